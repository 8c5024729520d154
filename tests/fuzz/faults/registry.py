"""The table of the kinds of faults.

Each is a function of the world. It returns how many faults it injected, and raises DeviationError
where the result isn't the required one.
"""

FAULTS = {}


def fault(weight, *, least=1):
    """Register a kind of fault: its weight, and the smallest number of ranks."""

    def register(function):
        FAULTS[function.__name__] = (function, weight, least)
        return function

    return register
