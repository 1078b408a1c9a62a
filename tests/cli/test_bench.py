"""`inlinevit bench`."""

import pytest

from inlinevit import cli

TINY = "inline_deit_tiny:depth=1,embed_dim=16,num_heads=2"
TINY_BENCH = f"bench model --quick --rounds 2 --threads 1 --models {TINY} --sizes 32 --batches 1 --modes eager"


def test_bench_prints_a_table_and_writes_a_report(tmp_path, capsys):
    cli.main([*TINY_BENCH.split(), "--output", str(tmp_path), "--name", "a"])
    output = capsys.readouterr().out
    assert "1 thread of" in output
    assert "All are measured in mode eager." in " ".join(output.split())
    assert TINY in output
    assert f"the report is {tmp_path / 'a.html'}" in output
    assert {path.name for path in tmp_path.iterdir()} == {"a.html", "a.json", "a.png", "a.svg"}


@pytest.mark.slow
def test_a_quick_bench_of_models_includes_the_best_modes_of_both(monkeypatch, capsys):
    from inlinevit.benchmark import runtimes

    # Compiling it takes most of a minute.
    monkeypatch.setattr(runtimes, "optimize_for_inference", lambda module: module)
    words = f"bench model --quick --rounds 2 --threads 1 --models {TINY} resnet10t --sizes 32 --batches 1"
    cli.main(words.split())
    printed = " ".join(capsys.readouterr().out.split())
    assert "The modes eager, optimized and openvino are compared; optimized not for resnet10t." in printed
    with pytest.raises(SystemExit):
        cli.main(["bench", "model", "--help"])
    assert "modes: eager, optimized, openvino" in " ".join(capsys.readouterr().out.split())


def test_bench_reports_nothing_if_outputs_differ(tmp_path, refused, monkeypatch):
    from inlinevit.benchmark.runtimes import MODES, Mode

    monkeypatch.setitem(MODES, "compiled", Mode("compiled", lambda module, x, threads: lambda: module(x) + 1))
    code, line = refused(*TINY_BENCH.split(), "compiled", "--output", tmp_path)
    assert code == 1
    assert "(eager) and" in line
    assert "should agree, but differ by" in line
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ("layr", "did you mean layer?"),
        ("model --sises 224", "did you mean --sizes?"),
        ("model --models deit_tiny_patch16_244", "did you mean deit_tiny_patch16_224?"),
        ("model --sizes 225", "use 224 or 256"),
        ("model --batches -1", "it should be at least 1"),
        ("model --threads 0", "threads is 0: it should be at least 1"),
        ("layer --tokens 50", "use 49 or 64"),
        ("detection --width 1333", "width 1333 is not a multiple of 32: use 1312 or 1344"),
        ("detection --detectors mask_rcn", "did you mean mask_rcnn?"),
        ("detection --backbones inline_deit_tiny", "choose a hierarchical"),
        ("resolution --modes egaer", "did you mean eager?"),
        ("window --device tpu", "it should be cpu or cuda"),
    ],
)
def test_mistakes_in_a_bench_are_answered_in_a_sentence(options, remedy, refused):
    assert remedy in refused("bench", *options.split())[1]
