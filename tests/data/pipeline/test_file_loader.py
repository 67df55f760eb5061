"""Training batches from image files: right pixels, right order, damaged files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms
from PIL.PngImagePlugin import PngInfo
from simpro_kernels.augment.reference import strong_policy

from simpro_fast.config.data import DataConfig
from simpro_fast.data.augment.crops import Square, resize_crop
from simpro_fast.data.augment.views import strong_table
from simpro_fast.data.batch import LoaderSettings
from simpro_fast.data.datasets.image_list import MEAN, STD, load_own_images
from simpro_fast.data.files.decode import Facts, check_file, read_rgb
from simpro_fast.data.loader import build_loader
from simpro_fast.data.pipeline import file_loader
from simpro_fast.data.pipeline.dali import built, import_dali
from simpro_fast.data.pipeline.file_graph import decode, path_array
from simpro_fast.data.sampling.draws import AugmentParams
from simpro_fast.data.splits.listed import listed_split
from simpro_fast.utils.errors import UserError
from tests.data.file_loaders import BATCH, MU, SIDE, L, M, V, assert_same, batches, loader
from tests.data.image_folders import cut, every_kind, picture, save, tidy
from tests.data.tar_shards import as_shards


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return every_kind(tmp_path_factory.mktemp("own"))


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_decoder_equals_pillow_in_every_format(tmp_path: Path, gpu: bool) -> None:
    """One pixel that differs would make evaluation and packing another input.

    A GPU's JPEG decoder may differ by 4.
    """
    image, grey = picture(1, 60, 50), picture(1, 60, 50).convert("L")
    clear = image.convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize(image.size))
    gamma = PngInfo()
    gamma.add(b"gAMA", (100_000).to_bytes(4, "big"))
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    files: dict[str, tuple[Image.Image, dict[str, Any]]] = {
        "plain.jpg": (image, {}),
        "best.jpg": (image, {"quality": 100, "subsampling": 0}),
        "progressive.jpg": (image, {"progressive": True}),
        "rgb.jpg": (image, {"keep_rgb": True}),
        "grey.jpg": (grey, {}),
        "cmyk.jpg": (image.convert("CMYK"), {}),
        "profile.jpg": (image, {"icc_profile": profile}),
        "phone.jpg": (image, {"format": "MPO", "save_all": True, "append_images": [picture(2)]}),
        "png.jpg": (image, {"format": "PNG"}),
        "dot.jpg": (image.resize((1, 1)), {}),
        "plain.png": (image, {}),
        "grey.png": (grey, {}),
        "one.png": (image.convert("1"), {}),
        "alpha.png": (clear, {}),
        "grey_alpha.png": (grey.convert("LA"), {}),
        "palette1.png": (image.quantize(2), {"bits": 1}),
        "palette4.png": (image.quantize(16), {"bits": 4}),
        "palette_alpha.png": (clear.quantize(32), {}),
        "key.png": (grey, {"transparency": 5}),
        "gamma.png": (image, {"pnginfo": gamma}),
        "profile.png": (image, {"icc_profile": profile}),
        "plain.webp": (image, {}),
        "alpha.webp": (clear, {"lossless": True}),
        "plain.bmp": (image, {}),
        "alpha.bmp": (clear, {}),
        "palette.bmp": (image.quantize(16), {}),
    }
    for orientation in range(10):
        exif = Image.Exif()
        exif[0x0112] = orientation
        files[f"turned{orientation}.jpg"] = (image, {"exif": exif})
    paths = [save(tmp_path / name, *args, **kwargs) for name, (*args, kwargs) in files.items()]
    sizes = [read_rgb(path).size for path in paths]
    width, height = (np.array([[size[k]] for size in sizes]) for k in (0, 1))
    inputs = [path_array(str(path)) for path in paths], height, width

    def graph() -> Any:
        fn, _, _ = import_dali()
        given = fn.external_source(source=lambda: inputs, num_outputs=3, batch=True)
        return decode(*given, read=True, gpu=gpu)

    device = torch.device("cuda" if gpu else "cpu")
    (decoded,) = built(graph, len(paths), device, num_threads=1, prefetch=1).run()
    for path, pixels_read in zip(paths, decoded.as_cpu() if gpu else decoded, strict=True):
        assert check_file(path).status == "ok", path.name
        expected = np.asarray(read_rgb(path)).astype(int)
        assert pixels_read.shape() == list(expected.shape), path.name
        with Image.open(path) as opened:
            allowed = 4 if gpu and opened.format in ("JPEG", "MPO") else 0
        assert np.abs(np.asarray(pixels_read) - expected).max() <= allowed, path.name


def pixels(views: torch.Tensor) -> np.ndarray:
    """Normalisation undone: float32 [n, H, W, 3] in 0..255."""
    return (views.permute(0, 2, 3, 1).numpy() * np.float32(STD) + np.float32(MEAN)) * 255


def test_views_are_what_pillow_makes_of_the_drawn_boxes(shared: Path) -> None:
    """Every format and orientation: within 1 of `resize(box=)` but for the outer ring."""
    seen = set()
    with loader(shared) as made:
        for step in range(4):
            batch, told = made.next(step), made.describe(step)
            assert batch.views.is_contiguous(memory_format=torch.channels_last)
            found = pixels(batch.views)
            row = 0
            for kind, count, num_views in (("labeled", BATCH, L), ("unlabeled", M, 1 + V)):
                paths = told["paths"][:BATCH] if kind == "labeled" else told["paths"][BATCH:]
                draws = AugmentParams.from_lists(told[f"{kind}_views"])
                crops = []
                for r in range(num_views * count):
                    image = read_rgb(Path(paths[r % count]))
                    crop = resize_crop(image, tuple(told[f"{kind}_boxes"][r]), Square(SIDE))
                    crops.append(crop[:, ::-1] if draws.flip[r] else crop)
                seen.update(Path(path).name for path in paths)
                expected = np.stack(crops)
                table = strong_table(draws, cutout=0, width=SIDE, height=SIDE)
                strong = strong_policy(torch.from_numpy(expected[count:]), table[count:]).numpy()
                plain = np.concatenate([np.full(count, True), ~draws.apply[count:].any(axis=1)])
                expected = np.concatenate([expected[:count], strong])
                difference = np.abs(found[row : row + num_views * count] - expected)
                assert difference[plain, 1:-1, 1:-1].max() < 1.01, (kind, step)
                # equalising may turn a difference of 1 into one of many, in few pixels
                assert np.median(difference.reshape(len(difference), -1), axis=1).max() < 1.01
                row += num_views * count
            assert row == len(found)
    assert {"turned6.jpg", "cmyk.jpg", "palette ü.PNG", "w.webp", "b.bmp"} <= seen


def test_labels_belong_to_their_files(shared: Path) -> None:
    with loader(shared) as made:
        for step in range(3):
            batch, told = made.next(step), made.describe(step)
            folders = [Path(path).parent.name for path in told["paths"][:BATCH]]
            assert [("cats", "dogs", "owls")[k] for k in batch.targets] == folders
            assert (batch.truth == -1).all()


def test_two_ranks_are_one(shared: Path) -> None:
    whole = batches(shared, 3)
    parts = [batches(shared, 3, rank=rank, world_size=2) for rank in range(2)]
    b, m = BATCH // 2, M // 2
    for step in range(3):
        joined, row = [], 0
        for count, num_views in ((b, L), (m, 1 + V)):
            for view in range(num_views):
                start = row + view * count
                joined += [parts[rank][step].views[start : start + count] for rank in range(2)]
            row += count * num_views
        assert torch.equal(torch.cat(joined), whole[step].views)
        targets = torch.cat([parts[rank][step].targets for rank in range(2)])
        assert torch.equal(targets, whole[step].targets)


def test_a_batch_is_a_function_of_seed_and_step(shared: Path) -> None:
    """Prefetching changes nothing either."""
    whole = batches(shared, 6)
    for a, b in zip(whole[3:], batches(shared, 3, start=3, prefetch=3), strict=True):
        assert_same(a, b)
    other = batches(shared, 1, seed=2)[0]
    assert not torch.equal(other.views, whole[0].views)
    strong = whole[0].views[L * BATCH + M :]
    assert not torch.equal(strong[:M], strong[M:]), "the two strong views differ"


def test_scales_of_weak_and_strong_views(shared: Path) -> None:
    changes = {"weak_scale": (0.81, 0.81), "strong_scale": (0.25, 0.25), "crop_ratio": (1, 1)}
    with loader(shared, **changes) as made:
        told = made.describe(0)
        sizes = [read_rgb(Path(path)).size for path in told["paths"][BATCH:]]
        box = np.array(told["unlabeled_boxes"]).reshape(1 + V, M, 4)
        share = (box[..., 2] - box[..., 0]) * (box[..., 3] - box[..., 1])
        share /= np.prod(sizes, axis=1)
        # a square of 81 % of the area of a long image does not fit and is cut
        assert (share[0] <= 0.81 + 1e-9).all() and (share[0] > 0.5).all()
        assert np.allclose(share[1:], 0.25)


@pytest.mark.parametrize("damage", ["cut", "text", "empty"])
def test_damaged_file_stops_the_run_with_its_name(tmp_path: Path, damage: str) -> None:
    """Damaged after the list was made."""
    root = tidy(tmp_path, unlabeled=M * 3)
    with loader(root) as made:
        first_bad = Path(made.describe(2)["paths"][-1])
        if damage == "cut":
            cut(first_bad, first_bad)
        else:
            first_bad.write_bytes(b"" if damage == "empty" else b"a note")
        made.next(0)
        made.next(1)
        with pytest.raises(UserError, match=f"data of step 2: {first_bad}: damaged") as caught:
            made.next(2)
        assert "data.on_bad_image=skip" in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1
        with pytest.raises(UserError, match=f"step 3: {first_bad}"):
            made.next(3)


def test_skipped_images_are_replaced_alike_everywhere(tmp_path: Path) -> None:
    root = tidy(tmp_path, labeled=(6, 5, 4), unlabeled=M * 2)
    unlabeled = root / "unlabeled"
    with loader(root) as made:
        bad = [Path(p) for p in made.describe(1)["paths"][BATCH : BATCH + 3]]
        bad += [Path(made.describe(0)["paths"][0])]
        untouched = [made.describe(step)["paths"] for step in range(4)]
    for path in bad:
        cut(path, path, 0.93)
    arguments: dict[str, Any] = {"on_bad_image": "skip"}
    with loader(root, **arguments) as made:
        whole, counted = [], []
        for step in range(4):
            whole.append(made.next(step))
            counted.append(made.replaced)
        told = [made.describe(step)["paths"] for step in range(4)]
    names = set(map(str, bad))
    expected = np.cumsum([sum(p in names for p in step) for step in untouched])
    assert counted == expected.tolist() and counted[-1] >= 5
    for before, after, batch in zip(untouched, told, whole, strict=True):
        for j, (old, new) in enumerate(zip(before, after, strict=True)):
            assert new not in names
            if old not in names:
                assert new == old
            elif j < BATCH:
                assert Path(new).parent == Path(old).parent, "the label stays"
            else:
                assert Path(new).parent == unlabeled
        assert [Path(p).parent.name for p in after[:BATCH]] == [
            ("cats", "dogs", "owls")[k] for k in batch.targets
        ]
    # a run that starts later, and knows nothing of the first failure, replaces them alike
    for a, b in zip(whole[1:], batches(root, 3, start=1, **arguments), strict=True):
        assert_same(a, b)
    halves = [batches(root, 4, rank=rank, world_size=2, **arguments) for rank in range(2)]
    for step, batch in enumerate(whole):
        targets = torch.cat([half[step].targets for half in halves])
        assert torch.equal(targets, batch.targets)
        weak = [half[step].views[L * BATCH // 2 :][: M // 2] for half in halves]
        assert torch.equal(torch.cat(weak), batch.views[L * BATCH :][:M])


def test_vanished_file_stops_even_when_skipping(tmp_path: Path) -> None:
    root = tidy(tmp_path)
    with loader(root, on_bad_image="skip", prefetch=1) as made:
        gone = Path(made.describe(1)["paths"][2])
        made.next(0)
        gone.unlink()
        with pytest.raises(UserError, match=f"step 1: {gone}: unreadable: No such file"):
            for step in range(1, 9):
                made.next(step)


def test_all_images_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_loader, "ATTEMPTS", 5)
    root = tidy(tmp_path)
    with loader(root, on_bad_image="skip") as made:
        for path in (root / "unlabeled").iterdir():
            cut(path, path)
        with pytest.raises(UserError, match="repair the data set"):
            for step in range(9):
                made.next(step)


def test_file_that_only_the_decoder_refuses_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Pillow is content, the graph's own decoder is asked, file by file."""
    root = tidy(tmp_path)
    with loader(root) as made:
        bad = Path(made.describe(0)["paths"][5])
        cut(bad, bad)
        monkeypatch.setattr(file_loader, "check_file", lambda path, **_: Facts())
        with pytest.raises(UserError, match=f"step 0: {bad}: damaged: the decoder of training"):
            made.next(0)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["files", "shards"])
def test_gpu_views_are_close_to_the_cpu_ones(shared: Path, tmp_path: Path, kind: str) -> None:
    folders = {part: shared / part for part in ("labeled", "unlabeled")}
    if kind == "shards":
        as_shards(shared, tmp_path)
        folders = {part: tmp_path / f"{part}-*.tar" for part in folders}
    data = DataConfig(name="images", image_size=SIDE, batch_size=BATCH, mu=MU, cutout=0, **folders)
    dataset = load_own_images(data)
    found = {}
    for device in ("cpu", "cuda"):
        settings = LoaderSettings(
            data=data, labeled_views=1, strong_views=1, device=torch.device(device), num_threads=2
        )
        made = build_loader(settings, dataset, listed_split(data, dataset))
        steps = [made.next(step) for step in range(6)]
        found[device] = [pixels(batch.views[: BATCH + M].cpu()) for batch in steps]
        made.close()
    for cpu, cuda in zip(found["cpu"], found["cuda"], strict=True):
        difference = np.abs(cpu - cuda)[:, 1:-1, 1:-1]
        assert difference.max() <= 5 and difference.mean() < 1


@pytest.mark.parametrize("failures", [2, 3])
def test_a_moment_without_the_file_system_does_not_end_a_run(
    shared: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """The pipeline says what it says; every file can be read when it is looked at."""
    monkeypatch.setattr("simpro_fast.data.pipeline.file_loader.PAUSES", (0.0, 0.0))
    expected = batches(shared, 4)
    with loader(shared) as ours:
        failed, run = [0], ours._outputs.run

        def sometimes(pipe: Any) -> list[torch.Tensor]:
            if ours._counter.expected == 3 and failed[0] < failures:
                failed[0] += 1
                raise RuntimeError("[/opt/dali] Input/output error")
            return run(pipe)

        monkeypatch.setattr(ours._outputs, "run", sometimes)
        for step in range(2):
            assert torch.equal(ours.next(step).views, expected[step].views)
        if failures == 3:
            with pytest.raises(UserError, match=r"data of step 2: .*Input/output error"):
                ours.next(2)
            return
        for step in (2, 3):
            assert torch.equal(ours.next(step).views, expected[step].views)
