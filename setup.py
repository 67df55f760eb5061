"""Packaging of simpro_fast and of the kernel library simpro_kernels."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

REQUIRED = [
    "torch>=2.6",  # tensors, autograd, optimizers, process groups
    "numpy>=1.26",  # index lists, the counter-based generator of the draws
    "pydantic>=2.6",  # the strict, typed configuration schema (DeepSpeed brings it as well)
    "pyyaml>=6.0",  # configuration files, safe loader only
    "rich>=13",  # tables of the doctor and of a run's report, fitted to the terminal
    "psutil>=5.9",  # addresses of the network interfaces (DeepSpeed brings it as well)
    "tqdm>=4.60",  # progress bars, also in notebooks (DeepSpeed brings it as well)
    "pillow>=10",  # checks, packs and evaluates image files; resizes STL-10
    "safetensors>=0.4",  # exported models that cannot run code
    "scipy>=1.11",  # reads MATLAB files (SVHN); scikit-learn brings it as well
    "scikit-learn>=1.3",  # the embedded digits; brings joblib, which counts cores
    "nvidia-dali-cuda130>=2.0; platform_system == 'Linux'",  # augmentation graphs, CPU and GPU
    "deepspeed>=0.16; platform_system == 'Linux'",  # training engine and multi-rank launcher
]
EXTRAS = {
    "report": [
        "matplotlib>=3.8",  # figures of a run
        "jinja2>=3.1",  # the page of a report: escapes every name; torch brings it as well
        "tensorboard>=2.15",  # event files
    ],
    "export": [
        "onnx>=1.16",  # the file format of exported graphs
        "onnxscript>=0.5",  # torch.onnx.export builds the graph with it
        "onnxruntime>=1.18",  # runs the exported graph, to compare it with PyTorch
    ],
    "parquet": ["pyarrow>=15"],  # manifests in Parquet
    "heif": ["pillow-heif>=0.20"],  # prepare --pack reads the HEIC photos of iPhones
    "wandb": ["wandb>=0.18"],  # log.wandb: numbers and figures on Weights & Biases
    "timm": ["timm>=1.0"],  # its networks as model.name: timm/<name>; brings torchvision
}
EXTRAS["dev"] = (
    EXTRAS["report"]
    + EXTRAS["export"]
    + EXTRAS["parquet"]
    + EXTRAS["heif"]
    + EXTRAS["timm"]
    + EXTRAS["wandb"]
    + [
        "pytest>=8",  # tests
        "pytest-xdist>=3.6",  # two of them at a time, which halves the time on two cores
        "hypothesis>=6.100",  # property tests of kernels and draws
        "ruff==0.17.*",  # lint and format
        "mypy>=1.10",  # types
        "types-PyYAML",  # types
        "quapy>=0.2",  # oracle of the point estimates of class shares
        "build>=1.2",  # the wheel test
        "nbclient>=0.10",  # runs the notebook of docs/
        "nbformat>=5.10",  # reads it
        "ipykernel>=6.29",  # the kernel that it runs in
    ]
)

# configs/ lives at the top of the tree; inside a wheel it is data of simpro_fast.
PACKAGES = [
    *find_packages(include=["simpro_fast", "simpro_fast.*"]),
    "simpro_kernels",
    *[f"simpro_kernels.{name}" for name in find_packages("kernels")],
    "simpro_fast.configs",
]

setup(
    name="simpro_fast",
    version="0.1.0",
    description="High-throughput realistic long-tailed semi-supervised learning (SimPro)",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=PACKAGES,
    package_dir={"simpro_kernels": "kernels", "simpro_fast.configs": "configs"},
    package_data={
        "simpro_fast.configs": ["*.yaml", "*/*.yaml", "*.csv"],
        "simpro_fast": [
            "py.typed",
            "data/datasets/imagenet_lists/*.json",
            "answers/report/templates/*",
        ],
        "simpro_kernels": ["py.typed", "*/README.md", "tuned/*.json"],
    },
    install_requires=REQUIRED,
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": [
            "simpro-fast = simpro_fast.cli.entry:main",
        ]
    },
)
