"""One table decides what computes, and all that could launch a kernel asks it."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.jit import KernelInterface

import specplug
from specplug import LLM, SamplingParams
from specplug.errors import UsageError
from specplug.kernels import card, cpu_kernels
from specplug.kernels.card import Card
from specplug.kernels.cpu_kernels import load_cpu_kernels
from specplug.kernels.kernel_table import (
    HALF,
    MODES,
    TABLE,
    VARIABLE,
    Implementation,
    Operation,
    attention_kernels,
    choose,
    kernels_in_c,
    kernels_mode,
    kernels_used,
    table_lines,
    table_rows,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROOT = Path(specplug.__file__).parents[1]
SPECULATION: dict[str, Any] = {
    "speculative_algorithm": "EAGLE3",
    "speculative_eagle_topk": 2,
    "speculative_num_steps": 2,
    "speculative_num_draft_tokens": 4,
}
PARAMS = SamplingParams(max_tokens=6, temperature=0.8, top_k=9, seed=3, ignore_eos=True)


AROUND_A_PASS = {
    "_root_trees", "_verify_drafts", "_move_accepted", "_publish", "_copy_rows", "_enter_pages",
    "_adjusted_scores", "_best_of_parts", "_noise", "_score_nodes",
}  # fmt: skip
"""Kernels that a step in float32 launches."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """By name, how often Triton kernels are launched and the CPU's are called from now on."""
    counts: Counter[str] = Counter()
    launcher_of = KernelInterface.__getitem__

    def launcher(kernel: Any, grid: Any) -> Any:
        counts[kernel.fn.__name__] += 1
        return launcher_of(kernel, grid)

    monkeypatch.setattr(KernelInterface, "__getitem__", launcher)
    compiled = load_cpu_kernels()
    for name, function in ({} if isinstance(compiled, str) else vars(compiled)).items():

        def called(*args: Any, name: str = name, function: Callable[..., Any] = function) -> Any:
            counts[f"C: {name}"] += 1
            return function(*args)

        if callable(function):
            monkeypatch.setattr(compiled, name, called)
    return counts


def _generate(**settings: Any) -> tuple[int, ...]:
    with LLM(max_running_requests=1, **settings) as llm:
        return llm.generate("def main():\n    ", PARAMS)[0].token_ids


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_torch_launches_no_kernel(dtype: str, launches: Counter[str]) -> None:
    with kernels_used("torch"):
        assert len(_generate(dtype=dtype, warm_up="on", **SPECULATION)) == PARAMS.max_tokens
    assert not launches


def test_auto_and_triton_launch_and_choose_as_torch(launches: Counter[str]) -> None:
    """What ``test_torch_launches_no_kernel`` counts is launched by the others."""
    found = {}
    for mode in MODES:
        launches.clear()
        with kernels_used(mode):
            found[mode] = _generate(dtype="float32", warm_up="off", **SPECULATION)
        if mode == "auto" and not torch.cuda.is_available():
            assert not isinstance(load_cpu_kernels(), str), load_cpu_kernels()
            assert set(launches) == {
                "C: _attend",
                "C: _layer",
                "C: _linear",
                "C: _norm",
                "C: _places",
                "C: _rotate",
                "C: _score",
                "C: _silu",
            }
        if mode == "triton":
            assert launches >= Counter(AROUND_A_PASS), AROUND_A_PASS - set(launches)
            assert not any(name.startswith("C: ") for name in launches)
    assert found["auto"] == found["triton"] == found["torch"]


@pytest.mark.parametrize("operation", Operation)
def test_choose_auto_depends_on_device_and_dtype(
    operation: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(device: torch.device) -> dict[torch.dtype, str]:
        dtypes = torch.float32, torch.float64, *HALF
        return {dtype: str(choose(operation, device, dtype).implementation) for dtype in dtypes}

    of_pass = operation in (Operation.ATTENTION, Operation.LAYERS)
    everywhere = "C" if operation is Operation.PLUGINS_C else "torch"
    in_c = operation in (Operation.SCORES, Operation.GREATEST)
    single = "C" if of_pass or in_c else everywhere
    with kernels_used("auto"):
        assert chosen(CPU) == dict.fromkeys((torch.float64, *HALF), everywhere) | {
            torch.float32: single
        }
        monkeypatch.setattr(card, "assumed", Card(232_448, (9, 0)))
        if operation is Operation.PLUGINS_C:
            assert set(chosen(CUDA).values()) == {"C"}
            return
        expected = dict.fromkeys(HALF, "triton")
        expected[torch.float32] = "torch" if of_pass else "triton"
        of_single = of_pass or operation in (Operation.SAMPLING, Operation.GREATEST)
        expected[torch.float64] = "torch" if of_single else "triton"
        if operation is Operation.SCORES:
            expected = dict.fromkeys(expected, "torch") | {torch.float32: "triton"}
        assert chosen(CUDA) == expected
    with kernels_used("torch"):
        assert set(chosen(CUDA).values()) == set(chosen(CPU).values()) == {"torch"}
        assert choose(operation, CUDA).why == "SPECPLUG_KERNELS=torch"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets ``SPECPLUG_KERNELS``, and has it read again."""

    def write(value: str) -> None:
        with kernels_used("auto"):
            monkeypatch.setenv(VARIABLE, value)

    yield write
    with kernels_used("auto"):
        monkeypatch.undo()


def test_environment_switches_the_table(environment: Callable[[str], None]) -> None:
    for mode in MODES:
        environment(mode)
        assert kernels_mode() == mode
    environment("")
    assert kernels_mode() == "auto"


def test_environment_of_another_value_is_refused(environment: Callable[[str], None]) -> None:
    environment("cuda")
    told = "SPECPLUG_KERNELS='cuda'; expected one of torch, triton, auto: set it"
    with pytest.raises(UsageError, match=told):
        LLM(device="cpu")
    with pytest.raises(UsageError, match=told):
        choose(Operation.PUBLISH)


def test_triton_without_interpreter_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with kernels_used("triton"):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        told = r"triton on cpu: \w.* TRITON_INTERPRET=1 is not set.*unset SPECPLUG_KERNELS"
        with pytest.raises(UsageError, match=told):
            attention_kernels(CPU, torch.float32)
    with kernels_used("triton"):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert attention_kernels(CPU, torch.float32) is None


def test_triton_on_an_old_card_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "assumed", Card(65_536, (7, 5)))
    with kernels_used("triton"):
        with pytest.raises(UsageError, match=r"compute capability 7\.5, the kernels need 8\.0"):
            attention_kernels(CUDA, torch.float16)
        assert attention_kernels(CUDA, torch.float32) is None


def test_table_printed_has_every_operation_and_why() -> None:
    with kernels_used("auto"):
        rows = table_rows(CPU)
        told = [operation for row in rows for operation in row[0].split(", ")]
        assert set(told) == set(TABLE) == set(Operation)
        assert all(all(row) for row in rows)
        said = "\n".join(table_lines(CPU, torch.float32))
    assert said.startswith("C for attention: on one thread; torch for softcaps, sinks")
    assert "\nC for layers, greatest: on one thread\n" in said
    assert all(operation in said for operation in Operation)
    assert {line.partition(" ")[0] for line in said.splitlines()} <= set(Implementation)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_several_threads_leave_c_to_torch() -> None:
    """The run, its log and the doctor say the same."""
    told = "C's is for one thread, and torch has 2"
    with kernels_used("auto"):
        for operation in (Operation.ATTENTION, Operation.LAYERS, Operation.SCORES):
            assert choose(operation, CPU, torch.float32, 1).implementation == "C"
            assert choose(operation, CPU, torch.float32).implementation == "torch"
            assert kernels_in_c(operation, CPU, torch.float32) is None
        said = [line for line in table_lines(CPU, torch.float32) if told in line]
        assert [line.partition(":")[0] for line in said] == [
            "torch for attention, layers",
            "torch for greatest, scores",
        ]
        rows = [row for row in table_rows(CPU) if "attention" in row[0] and "float32" in row[1]]
    assert [row[1:3] for row in rows] == [
        ("float32 (threads: 1)", "C"),
        ("float32 (threads: 2)", "torch"),
    ]
    with LLM(max_running_requests=1, device="cpu", num_threads=2) as llm:
        assert llm.effective_config["cpu_kernels"] == f"off: {told}"


def test_log_of_a_run_without_c_says_disabled(caplog: pytest.LogCaptureFixture) -> None:
    with (
        kernels_used("auto"),
        caplog.at_level("INFO", logger="specplug"),
        LLM(max_running_requests=1, device="cpu", disable_cpu_kernels=True),
    ):
        told = [each for each in caplog.messages if each.startswith("SPECPLUG_KERNELS=auto: ")]
    assert any(" torch for attention, layers: " in each and "disable_cpu" in each for each in told)
    assert not any(" C for " in each for each in told)


def test_no_compiler_is_told_by_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "load_cpu_kernels", lambda: "there is no C compiler")
    with kernels_used("auto"):
        choice = choose(Operation.ATTENTION, CPU, torch.float32, 1)
    assert choice.implementation == "torch"
    assert choice.why.endswith("; there is no C compiler")


ASKS = {"runs_triton", "runs_tree_kernels", "attention_kernels", "has_kernels", "_runs_kernels"}
ASKED_BEFORE = {
    "draft.py:_rooted_at_once": "rooted asks",
    "verify.py:_verify_at_once": "verify_tree asks",
    "sampler.py:_kernel_settings": "sample asks",
    "sampler.py:_cuts": "sample asks",
    "sampler.py:_path_of": "sample asks",
    "paged_plan.py:_places": "there is a PagedAttention, which the table gave",
    "paged_plan.py:rows": "there is a PagedAttention, which the table gave",
    "paged_plan.py:_write": "there is a PagedAttention, which the table gave",
    "seeded_noise.py:_kernel": "_uniform asks",
    "seeded_noise.py:_uniform_in_torch": "_uniform asks; it is torch's",
    "exact_linear.py:": "Target._use_kernels imports it, where the table gave a PagedAttention",
    "exact_norms.py:": "Target._use_kernels imports it, where the table gave a PagedAttention",
    "exact_experts.py:": "Target._use_kernels imports it, where the table gave a PagedAttention",
}
"""Functions, or modules, that import kernels without a look at the table, and why they may."""


def test_what_imports_kernels_asks_the_table() -> None:
    """On a CPU a launch that only a GPU sees is not counted: so each place is looked at."""
    kernels = ROOT / "specplug/kernels"
    launched = {file.stem for file in kernels.glob("*.py") if "import triton\n" in file.read_text()}
    assert len(launched) > 15
    files = [f for f in (ROOT / "specplug").rglob("*.py") if f.parent != kernels]
    files += [kernels / "argmax.py", kernels / "kernel_table.py"]
    hosts = [f for f in (ROOT / "hosts").glob("*/spec*/**/*.py") if "/." not in str(f)]
    own = {_module(f) for f in hosts if "\nimport triton\n" in f.read_text("utf-8")}
    assert own == {"specplug_vllm.v2.kernels", "specplug_vllm.v2.murmur_noise"}
    launched |= own
    found, silent = 0, set()
    for file in files + [f for f in hosts if _module(f) not in own]:
        for place, names in _imports_of_kernels(ast.parse(file.read_text("utf-8")), launched):
            found += 1
            if not names & ASKS:
                silent.add(f"{file.name}:{place}")
    assert found > 25
    assert silent == set(ASKED_BEFORE)


def _module(file: Path) -> str:
    """The name of a module of a host: ``specplug_vllm.v2.kernels``."""
    return ".".join(file.relative_to(ROOT / "hosts").with_suffix("").parts[1:])


def _imports_of_kernels(tree: ast.Module, launched: set[str]) -> Iterator[tuple[str, set[str]]]:
    """Yield the functions that import modules of kernels, '' for a module, and the names they
    use."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    typing = [node for node in ast.walk(tree) if isinstance(node, ast.If)
              and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"]  # fmt: skip
    inside = {id(n) for part in (*functions, *typing) for n in ast.walk(part) if n is not part}
    alone = [n for n in ast.walk(tree) if id(n) not in inside]
    for name, nodes in [("", alone), *((f.name, list(ast.walk(f))) for f in functions)]:
        for node in nodes:
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            module = node.module.removeprefix("specplug.kernels")
            parts = {module.lstrip(".")} if module else {each.name for each in node.names}
            if module == node.module:
                parts = {f"{module}.{each.name}" for each in node.names} | {module}
            if parts & launched:
                yield (
                    name,
                    {n.id for n in nodes if isinstance(n, ast.Name)}
                    | {n.attr for n in nodes if isinstance(n, ast.Attribute)},
                )
