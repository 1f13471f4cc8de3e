# SPDX-License-Identifier: Apache-2.0
"""`tools/versions_static.py`: the installed vLLM has all the connector uses; what a broken one lacks is told."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
METRICS = "distributed/kv_transfer/kv_connector/v1/metrics.py"
#: What another version may have changed: (file, text, its replacement, what must then be reported as missing).
CHANGES = [
    # names
    ("utils/network_utils.py", "def get_ip(", "def get_own_ip(", "vllm.utils.network_utils has no get_ip"),
    (
        "v1/kv_cache_interface.py",
        "def get_kv_cache_spec_kind(",
        "def spec_kind(",
        "vllm.v1.kv_cache_interface has no get_kv_cache_spec_kind",
    ),
    # hooks
    (BASE, "def on_new_request(", "def on_request(", "KVConnectorBase_V1 has no hook on_new_request"),
    (BASE, "self, layer_name: str", "self, name: str", "wait_for_layer_load: vLLM passes (self, name)"),
    (BASE, "self, metadata: dict[int,", "self, metadata, *, rank: int, a: dict[int,", "vLLM passes by name a, rank"),
    (
        BASE,
        "    def handle_preemptions(",
        "    @abstractmethod\n    def resume_all(self):\n        pass\n\n    def handle_preemptions(",
        "DataDistConnector does not implement the abstract resume_all",
    ),
    (
        BASE,
        "    @classmethod\n    def build_kv_connector_stats(\n        cls",
        "    def build_kv_connector_stats(\n        self",
        "build_kv_connector_stats: only one of vLLM's and ours is a classmethod",
    ),
    (BASE, 'kv_cache_config: "KVCacheConfig",\n    ):', "):", "super().__init__ takes (vllm_config, role)"),
    (METRICS, "self, transfer_stats_data:", "self, data:", "observe: vLLM passes (self, data, engine_idx)"),
    # attributes: of values, through annotations, of the base class, in comprehensions
    ("v1/request.py", "self.num_prompt_tokens", "self.prompt_length", "Request has no attribute num_prompt_tokens"),
    ("v1/outputs.py", "failed_recving", "failed", "KVConnectorOutput has no attribute failed_recving"),
    (
        "config/parallel.py",
        "    tensor_parallel_size: int",
        "    tp_size: int",
        "ParallelConfig has no attribute tensor_parallel_size",
    ),
    (
        "v1/kv_cache_interface.py",
        "transfer_group_ids",
        "group_ids",
        "KVCacheConfig has no attribute transfer_group_ids",
    ),
    ("v1/core/kv_cache_utils.py", "is_null: bool", "null: bool", "KVCacheBlock has no attribute is_null"),
    (BASE, "self._kv_cache_config", "self._cache_config", "KVConnectorBase_V1 has no attribute _kv_cache_config"),
    (METRICS, "_counter_cls", "_counters_cls", "KVConnectorPromMetrics has no attribute _counter_cls"),
    # texts
    ("v1/request.py", "FINISHED_ABORTED", "FINISHED_BY_CLIENT", "RequestStatus has no FINISHED_ABORTED"),
    ("v1/kv_cache_interface.py", '= "mla_attention"', '= "latent"', "KVCacheSpecKind has no mla_attention"),
]


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    sys.path.insert(0, str(TOOLS))
    yield importlib.import_module("versions_static")
    sys.path.remove(str(TOOLS))


@pytest.mark.slow
def test_the_installed_one_has_everything_and_a_broken_copy_misses_what_it_lacks(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tool.Source(tool.installed())
    findings = tool.check(source)
    assert findings.missing == []
    assert findings.compared["attributes"] > 100
    assert findings.compared["methods"] > 25
    for file in source.files:
        copy = tmp_path / file.relative_to(source.root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    for name, text, other, _ in CHANGES:
        _change(tmp_path / "vllm" / name, text, other)
    _change(tmp_path / "vllm" / BASE, "def get_mem_pool_context(", "def other_hook(")
    assert tool.main([str(tmp_path)]) == 1
    said = capsys.readouterr().out.splitlines()
    missing = [line for line in said if line.startswith("MISSING: vllm_datadist/")]
    assert [wanted for *_, wanted in CHANGES if not any(wanted in line for line in missing)] == []
    assert any(line.startswith("note:") and "get_mem_pool_context" in line for line in said), "that one can be lacking"


def _change(file: Path, text: str, other: str) -> None:
    content = file.read_text()
    assert text in content, f"{file.name} has no {text!r} any more: choose another change"
    file.write_text(content.replace(text, other))


def test_a_directory_without_vllm_is_named(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
