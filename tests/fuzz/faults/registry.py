"""The table of the kinds of faults.

Each is a function of the world. It returns how many faults it injected, and raises DeviationError
where something else came than must come.
"""

FAULTS = {}


def fault(weight, *, least=1):
    """Register a kind of fault: how often it is drawn, and the fewest ranks it makes sense on."""

    def register(function):
        FAULTS[function.__name__] = (function, weight, least)
        return function

    return register
