"""A Horovod user's script, in the shape of Horovod's examples; only its import is changed.

It was: import horovod.tensorflow.keras as hvd
"""

import argparse

import tensorflow as tf
from sklearn.datasets import load_digits

import strategies.tensorflow.horovod as hvd

parser = argparse.ArgumentParser(description="Keras digits")
parser.add_argument("--loop", choices=["fit", "own"], default="fit")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--checkpoint", required=True)


def make_model():
    return tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(16, [3, 3], activation="relu"),
            tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
            tf.keras.layers.Dropout(0.1),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )


def fit(args, dataset, steps):
    model = make_model()
    scaled_lr = 0.005 * hvd.size()
    opt = tf.optimizers.Adam(scaled_lr)
    opt = hvd.DistributedOptimizer(
        opt, backward_passes_per_step=1, average_aggregated_gradients=True
    )
    loss = tf.losses.SparseCategoricalCrossentropy()
    model.compile(loss=loss, optimizer=opt, metrics=["accuracy"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
    ]
    if hvd.rank() == 0:
        callbacks.append(tf.keras.callbacks.ModelCheckpoint(args.checkpoint))
    verbose = 2 if hvd.rank() == 0 else 0
    model.fit(
        dataset, steps_per_epoch=steps, callbacks=callbacks, epochs=args.epochs, verbose=verbose
    )
    return model


def own_loop(args, dataset, steps):
    model = make_model()
    loss = tf.losses.SparseCategoricalCrossentropy()
    opt = tf.optimizers.Adam(0.005 * hvd.size())

    @tf.function
    def training_step(images, labels, first_batch):
        with tf.GradientTape() as tape:
            probs = model(images, training=True)
            loss_value = loss(labels, probs)
        tape = hvd.DistributedGradientTape(tape)
        grads = tape.gradient(loss_value, model.trainable_variables)
        opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(opt.variables, root_rank=0)
        return loss_value

    for batch, (images, labels) in enumerate(dataset.take(args.epochs * steps)):
        loss_value = training_step(images, labels, batch == 0)
        if batch % 10 == 0 and hvd.local_rank() == 0:
            print(f"Step #{batch}\tLoss: {loss_value:.6f}", flush=True)
    if hvd.rank() == 0:
        tf.train.Checkpoint(model=model, optimizer=opt).save(args.checkpoint)
    return model


def main(args):
    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    data = load_digits()
    images = tf.cast(data.images[..., None] / 16, tf.float32)
    labels = tf.cast(data.target, tf.int64)
    dataset = tf.data.Dataset.from_tensor_slices((images[:1440], labels[:1440]))
    dataset = dataset.repeat().shuffle(1440).batch(32)
    steps = 45 // hvd.size()
    model = (fit if args.loop == "fit" else own_loop)(args, dataset, steps)
    right = tf.argmax(model(images[1440:]), 1) == labels[1440:]
    accuracy = hvd.allreduce(tf.reduce_mean(tf.cast(right, tf.float32)))
    if hvd.rank() == 0:
        print(f"Accuracy: {100 * float(accuracy):.2f}%")


if __name__ == "__main__":
    main(parser.parse_args())
