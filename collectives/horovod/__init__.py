"""What Horovod's interfaces for torch and TensorFlow have in common."""
