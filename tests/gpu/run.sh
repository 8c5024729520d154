#!/usr/bin/env bash
# The tests and the benchmark that need a GPU, on a machine that has one: run.sh [FOLDER OF WHEELS].
#
# It needs what `pip install -e '.[mpich,test,cuda12]' 'cupy-cuda12x[ctk]'` brings; with torch and JAX
# their tests run, too. Where nothing can be fetched, bring a folder of wheels (`pip download -d
# FOLDER` of the same list): they are installed below $SITE (default: /tmp/site). The tests use the
# first GPU alone. The log goes to $OUT/gpu.log, or to bench/results/gpu.log where OUT isn't set; so
# do the figures. PYTHON names the interpreter (default: python3), ONLY=tests or ONLY=bench a part.
# Two ranks share a GPU with NCCL 2.30 or newer: NEWER_NCCL may name a libnccl.so.2 for their tests.
set -uo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python3}
site=${SITE:-/tmp/site}
results=${OUT:-bench/results}
mkdir -p "$results"
exec > >(tee "$results/gpu.log") 2>&1

packages=$("$python" - "$site" <<'END'
import sys
import sysconfig

print(sysconfig.get_path("purelib", vars=dict.fromkeys(("base", "platbase"), sys.argv[1])))
END
)
if [ $# -gt 0 ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --ignore-installed \
        --prefix "$site" "$1"/*.whl || exit 2
fi
export PYTHONPATH="$PWD:$packages${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# Programs that wheels bring, mpirun among them, and their libraries.
export PATH="$site/bin:$PATH" LD_LIBRARY_PATH="$site/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
# Ranks share a GPU here, and jobs of others may use NCCL's port for diagnosis.
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} NCCL_RAS_ENABLE=0
# Processes share the GPU's memory.
export XLA_PYTHON_CLIENT_PREALLOCATE=false

echo "== the machine"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
nproc
"$python" - <<'END' || exit 2
import importlib.metadata
import platform
import sys

import cupy
import mpi4py
import numpy

runtime = cupy.cuda.runtime
print("Python", platform.python_version())
print("NumPy", numpy.__version__, " CuPy", cupy.__version__, " mpi4py", mpi4py.__version__)
for name in ("torch", "jax"):
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        print(name, "isn't installed")
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
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
titles=() jobs=()
group() {
    # A title, a limit in seconds, and pytest's arguments: a group that hangs takes no other along.
    # Groups run side by side until `finish`. Warnings differ between versions of the libraries.
    local title=$1 limit=$2
    shift 2
    timeout -k 10 "$limit" "$python" -m pytest -q -W default -p no:cacheprovider "$@" \
        >"$logs/${#titles[@]}" 2>&1 &
    titles+=("$title") jobs+=($!)
}

finish() {
    local number status
    for number in "${!titles[@]}"; do
        wait "${jobs[$number]}"
        status=$?
        echo "== ${titles[$number]}"
        cat "$logs/$number"
        if [ $status -ne 0 ]; then
            echo "== ${titles[$number]}: FAILED with status $status"
            failed=1
        fi
    done
    titles=() jobs=()
}

if [ "${ONLY:-tests}" = tests ]; then
    group "kernels" 120 -m gpu tests/gpu/test_kernels.py
    group "one rank" 240 -m gpu tests/gpu/test_one_rank.py
    group "torch" 120 -m gpu tests/gpu/test_torch.py
    group "two ranks on one GPU" 240 -m gpu tests/gpu/test_two_ranks.py
    group "torch and strategies on two ranks of one GPU" 240 -m gpu \
        tests/gpu/test_torch_ranks.py tests/gpu/test_strategies.py
    finish
    # What waits on the GPU for another rank needs its turns: apart from the others.
    if [ -n "${NEWER_NCCL:-}" ]; then export LD_PRELOAD="$NEWER_NCCL"; fi
    group "two ranks over NCCL on one GPU" 240 -m gpu tests/gpu/test_shared_gpu.py
    export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=1 GPU_TESTS_PATH=nccl
    group "torch and strategies on two ranks over NCCL on one GPU" 240 -m gpu \
        tests/gpu/test_torch_ranks.py tests/gpu/test_strategies.py
    unset LD_PRELOAD NCCL_MULTI_RANK_GPU_ENABLE NCCL_NVLS_ENABLE NCCL_MAX_CTAS GPU_TESTS_PATH
    group "JAX on three ranks of one GPU" 240 --worlds 3 \
        tests/frameworks/jax_collectives/test_{collectives,mpi4jax,strategies}.py
    finish
fi

bench() {
    local limit=$1
    shift
    timeout -k 10 "$limit" "$@" || failed=1
}

if [ "${ONLY:-bench}" = bench ]; then
    echo "== the benchmark"
    bench 60 "$python" -m bench.gpu bars --markdown "$results/gpu-bars.md"
    bench 200 "$python" -m bench.gpu all --sizes 8,4K,64K,1M,16M,64M \
        --markdown "$results/gpu.md" --json "$results/gpu.json"
    echo "== two ranks on one GPU, over CUDA IPC and through the host"
    for backend in auto mpi; do
        bench 60 mpirun -n 2 "$python" -m bench.gpu all_reduce --backend $backend \
            --sizes 8,64K,1M,16M --markdown "$results/gpu-2-ranks-$backend.md"
    done
    if "$python" -c "import torch" 2>/dev/null; then
        echo "== torch's calls"
        bench 60 "$python" -m bench.gpu.torch_calls
    fi
    echo "== where a call's Python time goes"
    bench 60 "$python" -m bench.gpu.host_overhead --profile
fi
exit $failed
