"""The microbenchmark: every collective over a range of sizes, like nccl-tests.

`python -m bench --help` shows the usage. A case (`bench.cases`) is one collective, a peer
(`bench.peers`) another library's collectives, a report (`bench.reports`) a form of output.
"""
