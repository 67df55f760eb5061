#!/usr/bin/env bash
# What a first run on a GPU machine should tell within five minutes.
#
#   bench/gpu_check.sh [--device cuda|cpu] [--smoke] [--output DIR]
#
# Kernel tests, kernel bench, then training steps on synthetic batches through the trainer's own
# train_step with the plain engine. Runs from the tree with torch, triton, numpy, pydantic, pyyaml,
# pillow, pytest and hypothesis; neither DALI nor DeepSpeed nor an installation is needed. Where DALI
# is there, also the data pipeline, and where Fashion-MNIST is, a whole run. Every part has a time
# limit and runs whatever became of the others; the last lines say which failed, and so does the
# exit code. CSV files and log.txt go to DIR (default: bench/results/gpu_check).
set -u
cd "$(dirname "$0")/.."
root=$PWD
device=cuda smoke="" output=bench/results/gpu_check
while [ $# -gt 0 ]; do
    case $1 in
        --device) device=$2; shift 2 ;;
        --output) output=$2; shift 2 ;;
        --smoke) smoke=1; shift ;;
        *) echo "unknown argument $1; see the head of bench/gpu_check.sh" >&2; exit 2 ;;
    esac
done
python=${PYTHON:-python3}
mkdir -p "$output"
output=$(cd "$output" && pwd)
: > "$output/log.txt"
exec > >(tee -a "$output/log.txt") 2>&1

# Run from the tree: the kernel package lies in kernels/ and is imported as simpro_kernels.
paths=$(mktemp -d)
trap 'rm -rf "$paths"' EXIT
ln -s "$root/kernels" "$paths/simpro_kernels"
export PYTHONPATH="$paths:$root${PYTHONPATH:+:$PYTHONPATH}"

failed=()
part() { # name, seconds, command...
    local name=$1 limit=$2 started=$SECONDS
    shift 2
    echo "== $name: $*"
    if timeout "$limit" "$@"; then
        echo "== $name: done after $((SECONDS - started)) s"
    else
        echo "== $name: FAILED (exit code $?) after $((SECONDS - started)) s"
        failed+=("$name")
    fi
}

has() { "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)" 2>/dev/null; }

echo "== machine"
[ "$device" = cpu ] || nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv
part versions 60 "$python" - <<'PY'
import platform, importlib.metadata as m
print("python", platform.python_version(), platform.machine())
for name in ("torch", "triton", "numpy", "pydantic", "nvidia-dali-cuda130", "deepspeed"):
    try:
        print(name, m.version(name))
    except m.PackageNotFoundError:
        print(name, "not installed")
import torch
print("CUDA", torch.version.cuda, "devices", torch.cuda.device_count())
PY
if [ "$device" = cuda ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no CUDA device is visible to torch; use --device cpu --smoke for a dry run" >&2
    exit 1
fi

step=("$python" bench/bench_step.py --part train --output "$output/step.csv" --steps)
common=(distributed.engine=plain "device=$device" data.name=synthetic
        data.labeled_fraction=null data.total_max=null data.gamma_labeled=1)
small=(data.labeled_max=10 data.unlabeled_max=20)
if [ -n "$smoke" ]; then
    part "kernel tests" 120 "$python" -m pytest -q -p no:cacheprovider tests/kernels_ops/test_arguments.py
    part "kernel bench" 120 "$python" bench/bench_adjusted_cross_entropy.py --smoke
    part "step, WRN-28-2" 120 "${step[@]}" 1 --config configs/cifar10_lt/consistent.yaml "${common[@]}" \
        "${small[@]}" data.batch_size=2 data.mu=2
else
    part "kernel tests" 100 "$python" -m pytest -q -x -p no:cacheprovider -m gpu tests/kernels_ops tests/training
    for op in pseudo_label adjusted; do
        part "kernel bench, $op" 60 "$python" "bench/bench_${op}_cross_entropy.py" --seconds 0.2
    done
    wrn=(--config configs/cifar10_lt/consistent.yaml "${common[@]}" "${small[@]}")
    part "step, WRN-28-2 fp32" 40 "${step[@]}" 30 "${wrn[@]}"
    part "step, WRN-28-2 bf16" 40 "${step[@]}" 30 "${wrn[@]}" train.precision=bf16
    part "step, WRN-28-2 bf16 compiled" 80 "${step[@]}" 50 "${wrn[@]}" train.precision=bf16 train.compile=default
    part "step, WRN-28-2 bf16 graphs" 80 "${step[@]}" 50 "${wrn[@]}" train.precision=bf16 train.compile=cuda-graphs
    part "step, ResNet-50 64 px" 80 "${step[@]}" 20 --config configs/small_imagenet_127/64.yaml "${common[@]}" "${small[@]}" \
        data.classes=127 data.image_size=64 train.precision=bf16
    part "step, ResNet-50 224 px" 80 "${step[@]}" 20 --config configs/imagenet_1k/224.yaml "${common[@]}" \
        data.labeled_max=1 data.unlabeled_max=2 data.classes=1000 data.image_size=224 train.precision=bf16
fi
if has nvidia.dali; then
    part "data pipeline" 90 "$python" bench/bench_step.py --part data,full --steps 10 --output "$output/step.csv" \
        --config configs/digits_lt/reversed.yaml distributed.engine=plain "device=$device"
    if [ -z "$smoke" ] && [ -d /usr/share/datasets/fashion-mnist ]; then
        part "Fashion-MNIST-LT, a whole run" 200 "$python" launch/train.py --config configs/fashion_mnist_lt/reversed.yaml \
            distributed.engine=plain "device=$device" "output_dir=$output/runs" log.figures=false log.tensorboard=false
    fi
else
    echo "== data pipeline: left out, DALI is not installed"
fi
if [ ${#failed[@]} -gt 0 ]; then
    printf '== failed: %s\n' "${failed[@]}"
    exit 1
fi
echo "== all parts done after $SECONDS s; results in $output"
