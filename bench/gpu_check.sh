#!/usr/bin/env bash
# What a GPU machine should tell, the most valuable minute first, in calls of ten minutes.
#
#   bench/gpu_check.sh [--part NAME,...] [--packages DIR]... [--output DIR] [--seconds N]
#                      [--device cuda|cpu] [--smoke]
#
# The first call, without --part:
#   buffers   that batches stay whole until a lagging device has read them (needs DALI)
#   kernels   the kernel tests, and the other tests that need a GPU
#   norm      batch norm with activation, and the augmentation: eager twin, torch.compile, kernel
#   step      WRN-28-2 in bf16, eager, compiled, as one graph: on a batch that is there, and with
#             the data (needs DALI), never waiting for the device
#   loss      the loss of the pseudo-labels as `norm`, at sizes that fill the device
#   profile   a WRN-28-2 step by parts and by kind of kernel
# The second, --part resnet,tune,end_to_end,jpeg:
#   resnet    ResNet-50 at 64 and 224 px
#   tune      bench/tune_kernels.py, the launch plans
#   end_to_end  WRN-28-2 against the usual way to write it (needs DALI)
#   jpeg      ResNet-50 from JPEG files, decoded on the GPU, likewise (needs nvImageCodec too)
# Others:
#   variants  the WRN-28-2 step with torch's batch norm, and in fp32 as TF32
#   train     a whole run on Fashion-MNIST, where its package is
#
# Runs from the tree, without an installation; needs what setup.py requires, pytest, hypothesis, and
# for end_to_end and jpeg torchvision. pytest-xdist makes the tests as many times faster as there are
# cores. What the machine lacks may lie in folders named by --packages: with a script env.sh, which
# is sourced, or as packages. Every part has processes and time limits of its own and
# runs whatever became of the others; all together stop after N seconds (580). Rows appear as they
# are measured, on the terminal, in log.txt and in CSV files of DIR (bench/results/gpu_check), so a
# run that is stopped keeps them, and the second call adds to those of the first. The table at the
# end, also in summary.md, has what was predicted beside it. The last lines say what failed, and so
# does the exit code.
set -u
here=$PWD
cd "$(dirname "$0")/.."
root=$PWD
absolute() { case $1 in /*) echo "$1" ;; *) echo "$here/$1" ;; esac; }
device=cuda smoke="" output=$root/bench/results/gpu_check seconds=580 packages=()
parts=buffers,kernels,norm,step,loss,profile
while [ $# -gt 0 ]; do
    case $1 in
        --device) device=$2; shift 2 ;;
        --output) output=$(absolute "$2"); shift 2 ;;
        --part) parts=$2; shift 2 ;;
        --packages) packages+=("$(absolute "$2")"); shift 2 ;;
        --seconds) seconds=$2; shift 2 ;;
        --smoke) smoke=1; shift ;;
        *) echo "unknown argument $1; see the head of bench/gpu_check.sh" >&2; exit 2 ;;
    esac
done
for name in ${parts//,/ }; do
    case $name in
        buffers|kernels|norm|step|loss|profile|resnet|tune|end_to_end|jpeg|variants|train) ;;
        *) echo "there is no part $name; see the head of bench/gpu_check.sh" >&2; exit 2 ;;
    esac
done
python=${PYTHON:-python3}
mkdir -p "$output"
exec > >(tee -a "$output/log.txt") 2>&1

for folder in ${packages[@]+"${packages[@]}"}; do
    [ -d "$folder" ] || { echo "--packages $folder: there is no such folder" >&2; exit 2; }
    if [ -f "$folder/env.sh" ]; then
        set +u; . "$folder/env.sh"; set -u
    else
        PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}"
    fi
done
# From the tree: the kernel package lies in kernels/ and is imported as simpro_kernels.
paths=$(mktemp -d)
trap 'rm -rf "$paths"' EXIT
ln -s "$root/kernels" "$paths/simpro_kernels"
export PYTHONPATH="$paths:$root${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 BENCH_RESULTS="$output"

failed=()
run() { # name, seconds, command...
    local name=$1 limit=$2 started=$SECONDS left=$((seconds - SECONDS))
    shift 2
    if [ "$left" -lt 5 ]; then
        echo "== $name: left out, the $seconds s are over"
        failed+=("$name (no time)")
        return
    fi
    [ -z "$smoke" ] || limit=300 # whatever the load of the machine
    [ "$limit" -le "$left" ] || limit=$left
    echo "== $name, at $started s, at most $limit: $*"
    # An interrupt lets pytest say what has failed so far.
    timeout -s INT -k 10 "$limit" "$@"
    local code=$?
    if [ "$code" -eq 0 ]; then
        echo "== $name: done after $((SECONDS - started)) s"
    elif [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then
        echo "== $name: STOPPED after $limit s, what is above and in the files is measured"
        failed+=("$name (stopped)")
    else
        echo "== $name: FAILED (exit code $code) after $((SECONDS - started)) s"
        failed+=("$name")
    fi
}

has() { "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)" 2>/dev/null; }

echo "== machine"
[ "$device" = cpu ] || nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv
"$python" - <<'PY' || [ "$device" = cpu ] || failed+=("C compiler or Python.h (missing)")
import importlib.metadata as m, importlib.util as u, os, pathlib, platform, shutil, sys, sysconfig
print("python", platform.python_version(), platform.machine(), os.cpu_count(), "cores")
modules = {"scikit-learn": "sklearn", "pytest-xdist": "xdist", "nvidia-dali-cuda130": "nvidia.dali"}
modules |= {"nvidia-nvimgcodec-cu13": "nvidia.nvimgcodec"}
names = "torch triton numpy pydantic rich psutil tqdm safetensors scipy joblib torchvision deepspeed pytest"
for name in (*names.split(), *modules):
    try:
        there = u.find_spec(modules.get(name, name)) is not None
    except ModuleNotFoundError:  # of the package that it lies in
        there = False
    version = next((d.version for d in m.distributions(name=name)), "of unknown version")
    print(name, version if there else "MISSING")
# With them Triton builds what launches a kernel.
compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
header = pathlib.Path(sysconfig.get_path("include"), "Python.h")
print("C compiler", compiler or "MISSING: install gcc")
print(header, "is there" if header.is_file() else "is MISSING: install the headers of Python")
sys.exit(not (compiler and header.is_file()))
PY
if [ "$device" = cuda ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no CUDA device is visible to torch; use --device cpu --smoke for a dry run" >&2
    exit 1
fi

tests=("$python" -m pytest -q -p no:cacheprovider)
cores=$(nproc)
[ "$cores" -le 8 ] || cores=8
if [ -z "$smoke" ] && has xdist; then tests+=(-n "$cores"); fi

plain=(distributed.engine=plain "device=$device")
synthetic=("${plain[@]}" data.name=synthetic data.labeled_fraction=null data.total_max=null data.gamma_labeled=1)
few=(data.labeled_max=10 data.unlabeled_max=20)
wrn=(--config configs/cifar10_lt/consistent.yaml "${synthetic[@]}")
small=("${wrn[@]}" "${few[@]}" model.name=small_cnn data.batch_size=2 data.mu=2)
step() { # name, seconds, parts, steps, options...
    local name=$1 limit=$2 which=$3 steps=$4
    shift 4
    run "$name" "$limit" "$python" bench/bench_step.py --part "$which" --output "$output/step.csv" --steps "$steps" "$@"
}
bench() { # name, seconds, operation, options...
    local name=$1 limit=$2 op=$3
    shift 3
    run "$name" "$limit" "$python" bench/bench_kernels.py --op "$op" --seconds 0.1 "$@" ${smoke:+--smoke}
}
dali() { has nvidia.dali || { echo "== $1: left out, DALI is not installed"; return 1; }; }
[ -z "$smoke" ] || wrn+=(model.name=small_cnn data.batch_size=2 data.mu=2)

part_buffers() {
    dali buffers || return
    run "batches under a lagging device" 40 "${tests[@]}" tests/data/pipeline/test_held_outputs.py
}
part_kernels() {
    if [ -n "$smoke" ]; then
        run "kernel tests" 90 "${tests[@]}" tests/kernels_ops/test_kernel_launch.py -k "tuned or kept"
        return
    fi
    # Those left out compile for other architectures or compare two compilers.
    run "kernel tests" 90 "${tests[@]}" -m "not slow" tests/kernels_ops \
        --ignore tests/kernels_ops/test_ahead_of_time.py --ignore tests/kernels_ops/test_compiled_twin.py
    run "tests of the step" 70 "${tests[@]}" -m gpu tests/training/test_no_sync.py tests/training/test_step_graph.py \
        tests/training/engine/test_compile.py tests/data/augment/test_views.py
}
part_norm() {
    local options=()
    [ -n "$smoke" ] || options=(--shape 1664x32x32,256x256x56)
    bench "batch norm" 45 batch_norm_act ${options[@]+"${options[@]}"}
    options=()
    [ -n "$smoke" ] || options=(--shape 32)
    bench "augmentation" 20 augment ${options[@]+"${options[@]}"}
}
part_step() {
    local which=train
    ! dali "steps with data" || which=train,full
    if [ -n "$smoke" ]; then
        step "digits" 50 "$which" 1 --config configs/digits_lt/reversed.yaml "${plain[@]}" data.mu=2
        return
    fi
    local options=("${wrn[@]}" data.labeled_max=500 data.unlabeled_max=4000 train.precision=bf16)
    step "WRN-28-2, bf16, eager" 50 "${which/full/full,data}" 60 "${options[@]}"
    step "WRN-28-2, bf16, compiled" 75 "$which" 60 "${options[@]}" train.compile=default
    step "WRN-28-2, bf16, compiled, one graph" 80 "$which" 60 "${options[@]}" train.compile=cuda-graphs
}
part_loss() {
    local options=()
    [ -n "$smoke" ] || options=(--shape 65536x1000,8192x21841,512x10,8192x21841x7)
    bench "loss of pseudo-labels" 60 pseudo_label_cross_entropy ${options[@]+"${options[@]}"}
}
part_profile() {
    local steps=10 options=("${wrn[@]}" "${few[@]}" train.precision=bf16)
    [ -z "$smoke" ] || steps=1 options=("${small[@]}")
    run "a WRN-28-2 step by kind of kernel" 40 "$python" bench/profile_step.py --kinds --steps "$steps" \
        --output "$output/profile_step.csv" "${options[@]}"
}
part_resnet() {
    local side options=(train.precision=bf16 train.compile=cuda-graphs)
    local of_64=(--config configs/small_imagenet_127/64.yaml data.classes=127 data.image_size=64)
    local of_224=(--config configs/imagenet_1k/224.yaml data.classes=1000 data.image_size=224)
    if [ -n "$smoke" ]; then
        step "ResNet-50" 70 train 1 "${of_64[@]}" "${synthetic[@]}" "${few[@]}" data.batch_size=1 data.mu=1 \
            data.image_size=16
        return
    fi
    step "ResNet-50, 64 px, bf16, one graph" 70 train 20 "${of_64[@]}" "${synthetic[@]}" "${few[@]}" "${options[@]}"
    step "ResNet-50, 224 px, bf16, one graph" 70 train 20 "${of_224[@]}" "${synthetic[@]}" data.labeled_max=1 \
        data.unlabeled_max=2 "${options[@]}"
}
part_tune() {
    [ "$device" = cuda ] || { echo "== tune: left out, it needs a GPU"; return; }
    run "launch plans" 240 "$python" bench/tune_kernels.py
    cp kernels/tuned/*.json "$output" 2>/dev/null || true
}
against_the_usual_code() { # name, seconds, recipe, parts, options...
    local name=$1 limit=$2 recipe=$3 which=$4
    shift 4
    run "$name" "$limit" "$python" bench/end_to_end.py --device "$device" --recipe "$recipe" --part "$which" \
        --rounds 3 ${smoke:+--smoke} distributed.engine=plain "$@"
}
part_end_to_end() {
    dali end_to_end || return
    if [ -n "$smoke" ]; then
        against_the_usual_code "end to end" 105 digits train data.mu=2
        return
    fi
    against_the_usual_code "end to end, CIFAR shape" 105 cifar train,full train.precision=bf16 \
        train.compile=cuda-graphs
}
part_jpeg() {
    dali jpeg || return
    if [ -n "$smoke" ]; then
        against_the_usual_code "JPEG files" 90 resnet50_224 data data.image_size=32 data.batch_size=1 \
            data.mu=1 model.name=small_cnn
        return
    fi
    against_the_usual_code "JPEG files, 224 px" 90 resnet50_224 data,full train.precision=bf16
}
part_variants() {
    if [ -n "$smoke" ]; then
        step "variants" 60 train 1 "${small[@]}"
        return
    fi
    local options=("${wrn[@]}" "${few[@]}" train.compile=cuda-graphs)
    step "torch's batch norm" 60 train 40 "${options[@]}" train.precision=bf16 model.norm_impl=eager
    step "fp32 as TF32" 60 train 30 "${options[@]}"
}
part_train() {
    if [ ! -d /usr/share/datasets/fashion-mnist ]; then
        echo "== train: left out, the package dataset-fashion-mnist is not installed"
        return
    fi
    run "Fashion-MNIST-LT, a whole run" 200 "$python" launch/train.py --config configs/fashion_mnist_lt/reversed.yaml \
        "${plain[@]}" "output_dir=$output/runs" log.figures=false log.tensorboard=false
}

for name in ${parts//,/ }; do
    "part_$name"
done
echo "== summary, after $SECONDS s; results in $output"
"$python" bench/gpu_summary.py "$output" ${failed[@]+"${failed[@]}"} || failed+=("summary")
[ ${#failed[@]} -eq 0 ] || { printf '== failed: %s\n' "${failed[@]}"; exit 1; }
echo "== all parts done"
