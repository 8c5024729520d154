"""The microbenchmark: every collective over a range of sizes, in the manner of nccl-tests.

`python -m bench --help` tells the usage. A case (`bench.cases`) is one collective, a peer
(`bench.peers`) another library's collectives, a report (`bench.reports`) a way to show the rows.
"""
