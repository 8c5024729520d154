"""A program that trains, saves and restores; tests start it on different numbers of ranks.

    checkpoint_program.py save|restore|inspect <path> [none]

save: trains 3 steps, saves, trains 2 more; restore: starts from other values, restores, trains 2.
Rank 0 prints the final values as JSON, and each rank the digest of its parameters.
"""

import hashlib
import json
import sys

import numpy as np

import strategies
from strategies import Variable, VariableAggregation, VariableSynchronization, metrics, optimizers
from strategies.checkpoint import Checkpoint


class Model:
    def __init__(self, start):
        self.layers = [Variable(np.full((2, 3), start)), Variable(np.full(3, start))]
        self.seen = Variable(
            0,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )


def main():
    mode, path = sys.argv[1:3]
    alone = "none" in sys.argv
    strategy = strategies.get_strategy() if alone else strategies.MultiWorkerMirroredStrategy()
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        model = Model(1.0 if mode == "save" else -50.0)
        adam, descent = optimizers.Adam(0.1), optimizers.SGD(0.1, momentum=0.9)
        loss = metrics.Mean(dtype=np.float64)
    checkpoint = Checkpoint(model=model, adam=adam, descent=descent, loss=loss)

    def step(number):
        # The sum of the replicas' gradients equals that of one replica, whatever their number.
        gradient = np.arange(6.0).reshape(2, 3) * (number + 1) / replicas
        adam.apply_gradients([(gradient, model.layers[0])])
        descent.apply_gradients([(gradient[0] + 1 / replicas, model.layers[1])])
        replica = strategies.get_replica_context().replica_id_in_sync_group
        if replica == 0:
            model.seen.assign_add(12)
            loss.update_state([number, 2.0 * number])

    def train(numbers):
        for number in numbers:
            strategy.run(step, (number,))

    if mode == "save":
        train(range(3))
        checkpoint.save(path)
    else:
        checkpoint.restore(path)
    restored = [each.numpy().tolist() for each in model.layers]
    train(range(3, 5))
    ended = {
        "restored": restored,
        "layers": [each.numpy().tolist() for each in model.layers],
        "seen": int(model.seen),
        "loss": float(loss.result()),
        "steps": [adam.iterations, descent.iterations],
    }
    digest = hashlib.sha256(json.dumps(ended).encode()).hexdigest()
    if not alone:
        digests = strategy.communicator.all_gather_object(digest)
        assert set(digests) == {digest}
    if strategy.is_chief:
        print(json.dumps(ended))


main()
