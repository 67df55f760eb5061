"""What users of other trainers mean by a flag or a key that does not exist here."""

from __future__ import annotations

# Given to the script they would silently start something smaller than was asked for.
LAUNCHER = {
    *("hostfile", "num-gpus", "num-nodes", "include", "exclude", "no-ssh"),
    *("node-rank", "nnodes", "nproc-per-node", "master-addr", "master-port"),
}
RESUME = {"resume", "continue", "restart", "resume-from", "auto-resume", "resume-from-checkpoint"}
GPUS = {"gpus", "gpu", "gpu-ids", "devices", "world-size", "ngpus", "n-gpu"}
# Key, or key and value, to names of it elsewhere, in small letters and with dashes.
WORDS = {
    "train.steps": (
        *("epochs", "epoch", "num-epochs", "max-epochs", "n-epochs", "num-train-epochs"),
        *("iterations", "iters", "max-iter", "max-iters", "num-iters", "num-train-iter"),
        *("max-steps", "total-steps", "num-steps", "train-steps"),
    ),
    "train.period": ("num-eval-iter", "steps-per-epoch", "iters-per-epoch"),
    "train.ema_decay": ("ema", "ema-m", "ema-momentum", "model-ema", "model-ema-decay"),
    "train.precision": ("precision", "dtype", "mixed-precision"),
    "train.precision=bf16": ("amp", "use-amp", "autocast", "fp16", "bf16", "half"),
    "train.compile=default": ("torch-compile", "torchcompile", "use-compile", "compile-model"),
    "train.data_threads": ("workers", "num-workers", "num-threads", "n-workers", "j"),
    "train.profile=true": ("profiler", "use-profiler"),
    "data.batch_size": ("bs", "batch", "b", "train-batch-size", "per-device-train-batch-size"),
    "data.mu": ("uratio", "mu-ratio", "unlabeled-ratio"),
    "data.name": ("dataset", "data-set", "dataset-name"),
    "data.root": ("data", "data-dir", "data-path", "data-root", "dataset-path", "dataroot"),
    "data.image_size": ("img-size", "imgsz", "input-size", "crop-size", "train-crop-size"),
    "data.gamma_labeled": ("gamma", "imbalance", "imb-ratio", "imb-factor", "imb-ratio-l"),
    "data.gamma_unlabeled": ("imb-ratio-u", "imb-ratio-unlabel", "gamma-u"),
    "data.labeled_max": ("num-labels", "num-labeled", "n-labeled", "num-max"),
    "data.unlabeled_max": ("num-unlabeled", "n-unlabeled", "num-max-u"),
    "model.name": ("model", "arch", "net", "network", "backbone", "model-name"),
    "model.weights": ("pretrained", "weights", "init", "checkpoint", "pretrained-path"),
    "model.lora_rank": ("lora", "lora-r"),
    "method.name": ("method", "algorithm", "alg"),
    "method.threshold": ("p-cutoff", "cutoff", "conf-threshold"),
    "optim.name": ("optimizer", "opt"),
    "optim.lr": ("learning-rate", "base-lr", "init-lr", "max-lr"),
    "optim.weight_decay": ("wd", "decay", "l2"),
    "optim.schedule": ("scheduler", "lr-schedule", "lr-scheduler", "lr-scheduler-type", "sched"),
    "optim.warmup_steps": ("warmup", "warmup-epochs", "warmup-iters", "num-warmup-iter"),
    "optim.grad_clip": ("clip", "clip-grad", "clip-grad-norm", "max-grad-norm"),
    "optim.backbone_lr_scale=0": ("freeze", "freeze-backbone", "linear-probe"),
    "device=cpu": ("cpu", "no-cuda", "use-cpu"),
    "device=cuda": ("cuda", "use-cuda"),
    "seed": ("manual-seed", "random-seed", "random-state"),
    "name": ("exp-name", "run-name", "experiment", "save-name", "exp"),
    "output_dir": ("out", "output", "save-dir", "log-dir", "logdir", "save-path", "out-dir"),
    "evaluate.every": ("eval-every", "eval-step", "eval-freq", "eval-interval", "val-interval"),
    "checkpoint.every": ("save-every", "save-freq", "save-interval", "save-steps"),
    "distributed.sync_bn": ("sync-batchnorm", "syncbn", "sync-bn"),
    "distributed.zero_stage": ("zero", "zero-stage"),
    "distributed.micro_batch": (
        *("gradient-accumulation-steps", "grad-accum", "grad-accum-steps", "accumulate"),
        *("accumulation-steps", "accumulate-grad-batches"),
    ),
    "distributed.engine": ("deepspeed", "deepspeed-config", "ds-config"),
    "log.wandb=true": ("use-wandb", "with-wandb"),
    "log.wandb": ("wandb-project",),
    "log.tensorboard=true": ("tb", "use-tensorboard"),
}
_KEYS = {word: key for key, words in WORDS.items() for word in words}
_EPOCHS = " (the papers' epoch is one period of train.period steps)"


def written(name: str) -> str:
    """A flag or a key as `WORDS` has them."""
    return name.lower().replace("_", "-")


def key_of(name: str) -> tuple[str, str] | None:
    """The key, with `=value` where the name implies one, and a remark; None: not known."""
    word = written(name)
    key = _KEYS.get(word)
    return None if key is None else (key, _EPOCHS if "epoch" in word else "")


def not_a_key(name: str) -> str | None:
    """The end of a line about what is the launcher's, or goes without saying; else None."""
    word = written(name)
    if word in LAUNCHER:
        return "; it is the launcher's, and belongs before launch/train.py"
    if word in RESUME:
        return (
            "; the same command goes on by itself from the newest checkpoint, "
            "see checkpoint.resume=auto|none|PATH"
        )
    if word in GPUS:
        return "; ranks are the launcher's: deepspeed --num_gpus N launch/train.py ..."
    return None
