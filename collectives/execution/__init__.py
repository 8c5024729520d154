"""Execution of collectives on flat buffers: select an algorithm, bind its plan, run it."""
