#!/usr/bin/env bash
# The tests and the benchmark that need a GPU, on a machine that has one: run.sh [FOLDER OF WHEELS].
#
# It needs what `pip install -e '.[mpich,test,cuda12]' 'cupy-cuda12x[ctk]'` brings. Where nothing can
# be fetched, bring a folder of wheels (`pip download -d FOLDER` of the same list): they are installed
# into $SITE (default: /tmp/site). The tests use the first GPU alone. The log goes to $OUT/gpu.log, or to bench/results/gpu.log where OUT isn't set; so do the figures. PYTHON
# names the interpreter (default: python3).
set -uo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python3}
site=${SITE:-/tmp/site}
results=${OUT:-bench/results}
mkdir -p "$results"
exec > >(tee "$results/gpu.log") 2>&1

if [ $# -gt 0 ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$site" "$1"/*.whl || exit 2
fi
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# Programs that wheels bring, mpirun among them, lie in the same folder.
export PATH="$site/bin:$PATH" LD_LIBRARY_PATH="$site/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
# Ranks share a GPU here, and jobs of others may use NCCL's port for diagnosis.
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} NCCL_RAS_ENABLE=0

echo "== the machine"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
nproc
"$python" - <<'END' || exit 2
import platform
import sys

import cupy
import mpi4py
import numpy

runtime = cupy.cuda.runtime
print("Python", platform.python_version())
print("NumPy", numpy.__version__, " CuPy", cupy.__version__, " mpi4py", mpi4py.__version__)
print("CUDA runtime", runtime.runtimeGetVersion(), " driver for", runtime.driverGetVersion())
try:
    print("NVRTC", cupy.cuda.nvrtc.getVersion())
except Exception as error:
    print("NVRTC can't be loaded:", str(error).splitlines()[0])
import cupy.cuda.nccl

print("NCCL", cupy.cuda.nccl.get_version() if cupy.cuda.nccl.available else "can't be loaded")
try:
    print("GPUs", runtime.getDeviceCount(), runtime.getDeviceProperties(0)["name"].decode())
except runtime.CUDARuntimeError as error:
    sys.exit(f"no GPU: {error}")
from mpi4py import MPI

print(MPI.Get_library_version().splitlines()[0])
END

failed=0
group() {
    # A title, a limit in seconds, and pytest's arguments: a group that hangs takes no other along.
    local title=$1 limit=$2
    shift 2
    echo "== $title"
    timeout -k 10 "$limit" "$python" -m pytest -m gpu -q -p no:cacheprovider "$@"
    local status=$?
    if [ $status -ne 0 ]; then
        echo "== $title: FAILED with status $status"
        failed=1
    fi
}

group "kernels" 120 tests/gpu/test_kernels.py
group "one rank" 240 tests/gpu/test_one_rank.py
group "torch" 120 tests/gpu/test_torch.py
group "two ranks on one GPU" 300 tests/gpu/test_two_ranks.py
group "two ranks over NCCL on one GPU" 260 tests/gpu/test_shared_gpu.py

bench() {
    local limit=$1
    shift
    timeout -k 10 "$limit" "$python" -m bench.gpu "$@" || failed=1
}

echo "== the benchmark"
bench 120 bars --markdown "$results/gpu-bars.md"
bench 400 all --sizes 8,1K,16K,64K,256K,1M,4M,16M,64M \
    --markdown "$results/gpu.md" --json "$results/gpu.json"
echo "== where a call's Python time goes"
timeout 60 "$python" -m bench.gpu.host_overhead --profile
exit $failed
