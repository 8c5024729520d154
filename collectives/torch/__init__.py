"""The torch.distributed backend "collectives".

Importing this module registers it: `torch.distributed.init_process_group("collectives")`. Versions
of torch that read the entry points of the group "torch.backends" (2.5 and later) register it
themselves.
"""

from collectives.torch.registration import register

__all__ = ["register"]

register()
