"""warpsmith.distributed.plan beside published runs, on this machine, from the command line."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from warpsmith.cli import main
from warpsmith.distributed import plan
from warpsmith.distributed.plan import prediction
from warpsmith.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
import plan_published as published

SIZES = "--layers 12 --hidden 768 --heads 12 --vocabulary 50304 --sequence 1024 --tied".split()
# What the errors were when the formulas were written: (mean, worst) of |predicted / published - 1|.
ERRORS = {"step": (0.160, 0.36), "memory": (0.071, 0.275), "scaling": (0.0225, 0.0425)}


@pytest.mark.parametrize("what", ERRORS)
def test_errors_on_published_runs_do_not_grow(what, figure):
    mean, worst = ERRORS[what]
    found = published.errors()[what]
    figure(f"plan: {what}: mean {found.mean:.3f}, worst {found.worst:.3f} of {len(found.ratios)} published runs")
    assert found.mean <= mean and found.worst <= worst, found.ratios


def test_predictions_print_the_ratios_of_the_published_runs():
    found = {what: (error.low, error.high) for what, error in published.errors().items()}
    assert found.keys() == prediction.PUBLISHED.keys()
    for what, ratios in prediction.PUBLISHED.items():
        assert ratios == pytest.approx(found[what], abs=5.1e-5), what


def test_the_document_says_what_an_unstated_setting_decides():
    cases = {case.name: case for case in published.cases()}
    few, many = (cases[f"Megatron 177B, H100 x {ranks}"] for ranks in (96, 4608))
    shares = []
    for chunks in (16, 8, 4, 2, 1):
        runs = [
            dataclasses.replace(case, layout=dataclasses.replace(case.layout, interleave=chunks))
            for case in (few, many)
        ]
        shares.append(f"{plan.efficiency([run.predict() for run in runs])[1]:.2f}")
    text = (Path(__file__).parents[2] / "docs/plan.md").read_text(encoding="utf-8")
    assert f"{', '.join(shares[:-1])} and {shares[-1]}" in text


def test_published_runs_cover_what_they_should():
    names = [case.name for case in published.cases()]
    assert len(names) == len(set(names))
    for words, count in (("GPT ", 12), ("torchtitan", 10), ("Megatron", 11), ("vTrain", 4), ("GPT-2", 7)):
        assert sum(words in name for name in names) >= count, words
    assert {8, 64, 280, 512, 96, 4608, 128} <= {case.layout.ranks for case in published.cases()}
    for case in published.cases():
        assert case.source and (case.step_s or case.memory_bytes)


def test_published_mfu_is_what_megatrons_table_says():
    """Two columns of images/model_table.png: TFLOP/s, of which the step's seconds are made, and MFU in percent."""
    percent = {"1.7B": 41, "7.1B": 47, "16B": 49, "32B": 46, "70B": 42, "119B": 43, "314B": 48, "462B": 47}
    for case in published.cases():
        size = case.name.removeprefix("Megatron ").split(",")[0]
        if case.name.startswith("Megatron") and size in percent:
            flops = case.model.flops_per_token * case.layout.sequences * case.model.sequence
            mfu = flops / case.step_s / case.layout.ranks / case.cluster.gpu.peak_flops
            assert round(100 * mfu) == pytest.approx(percent[size], abs=1)


def test_a_prediction_prints_its_parts_and_its_error():
    case = published.cases()[0]
    found = case.predict()
    text, error = str(found), published.errors()["step"]
    assert f"{error.low:.2f} to {error.high:.2f}" in text
    assert "matrix products" in text and "memory" in text and "MFU" in text and "failures" in text
    assert sum(found.times.values()) == pytest.approx(found.step_s)
    assert found.tokens_per_s == pytest.approx(case.layout.sequences * case.model.sequence / found.step_s)


def test_scaling_to_ten_thousand_ranks():
    model = plan.Model.from_config({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12,
                                    "vocab_size": 50257, "n_positions": 1024})  # fmt: skip
    found = plan.scaling(model, plan.Cluster.of("H100"), plan.Layout(micro_batch=64))
    shares = plan.efficiency(found)
    assert found[-1].layout.ranks == 8192
    assert all(a >= b for a, b in zip(shares, shares[1:], strict=False)) and 0.5 < shares[-1] < 1.0
    strong = plan.scaling(model, plan.Cluster.of("H100"), plan.Layout(micro_batches=64), (1, 4, 64), strong=True)
    assert {p.layout.sequences for p in strong} == {64}
    assert [p.layout.micro_batches for p in strong] == [64, 16, 1]
    assert strong[0].step_s > strong[1].step_s > strong[2].step_s


def test_plots_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    found = plan.predict(published.cases()[0].model, plan.Cluster.of("H100"), plan.Layout(tensor=8))
    figure = found.plot(tmp_path / "plan.png", ranks=(8, 64, 512))
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"
    assert list(figure.axes[1].lines[0].get_xdata()) == [8, 64, 512]


GPT = plan.Model(layers=8, hidden=64, heads=4, vocabulary=100, sequence=16)
A100, H100 = plan.Cluster.of("A100"), plan.Cluster.of("H100")


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: plan.Model(2, 64, 4, 9, 9, kv_heads=3), "Model: kv_heads: expected a divisor of heads, 4, got 3"),
        (lambda: plan.Model(2, 64, 4, 9, 9, dtype="int4"), "Model: dtype: expected one of bfloat16, float16, float8"),
        (lambda: plan.Model.from_config({"n_layer": 2}), "Model.from_config: hidden: expected hidden_size or n_embd"),
        (lambda: plan.Layout(sharding=4), "Layout: sharding: expected one of 0, 1, 2, 3, got 4"),
        (lambda: plan.Layout(wire="int8"), "Layout: wire: expected one of float32, bfloat16, float16, got int8"),
        (lambda: plan.Layout(interleave=2), "Layout: interleave: expected 1 without a pipeline, got 2"),
        (lambda: plan.Cluster.of("H999"), "Cluster.of: gpu: expected one of A100, H100, H200, B200"),
        (lambda: plan.Cluster.of("H100", 0), "Cluster.of: network_gbit: expected above 0, got 0"),
        (lambda: plan.Cluster.of("H100", -4), "Cluster.of: network_gbit: expected above 0, got -4"),
        (lambda: plan.Cluster(H100.gpu, network_bytes_per_s=0), "Cluster: network_bytes_per_s: expected above 0"),
        (lambda: plan.Cluster.of("H100", base_s=float("inf")), "Cluster: base_s: expected at least 0 and finite"),
        (lambda: H100.collective_s("all_reduce", 1, ranks=-2), "Cluster.collective_s: ranks: expected at least 1"),
        (lambda: H100.collective_s("all_reduce", -1, ranks=2), "Cluster.collective_s: tensor_bytes: expected at"),
        (lambda: plan.Cluster.of("H100", spread=1.5), "Cluster: spread: expected from 0 to below 1, got 1.5"),
        (lambda: H100.collective_s("gossip", 1, ranks=2), "Cluster.collective_s: kind: expected one of all_reduce"),
        (lambda: plan.predict(GPT, H100, plan.Layout(pipeline=4, interleave=3)), "predict: layout: expected at most 8"),
        (lambda: plan.predict(GPT, H100, plan.Layout(tensor=8)), "predict: layout: expected tensor at most 4"),
        (
            lambda: plan.predict(dataclasses.replace(GPT, dtype="float8"), A100, plan.Layout()),
            "predict: model: expected a 16-bit dtype on A100, got float8",
        ),
        (lambda: plan.scaling(GPT, H100, plan.Layout(tensor=4), (6,)), "scaling: ranks: expected multiples of 4"),
        (
            lambda: plan.scaling(GPT, H100, plan.Layout(micro_batches=8), (3,), strong=True),
            "scaling: ranks: expected replicas that divide 8 micro-batches of a step, got 3",
        ),
        (lambda: plan.fit_link([]), "fit_link: points: expected at least one"),
        (lambda: plan.fit_link([("all_reduce", 2, 8, 0.0)]), "fit_link: points: expected seconds above 0"),
        (lambda: plan.calibrate("cpu", repeats=0), "calibrate: repeats: expected at least 1"),
        (lambda: plan.calibrate("cpu", ranks_per_host=2), "calibrate: ranks_per_host: expected a divisor of 1 ranks"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value).startswith(words)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: plan.Cluster.of(None), "Cluster: gpu: expected a Gpu, got None"),
        (lambda: plan.Cluster.of("H100", "400"), "Cluster.of: network_gbit: expected a number, got the str '400'"),
        (lambda: plan.Cluster.of("H100", ranks_per_host=2.5), "Cluster: ranks_per_host: expected an int, got the fl"),
        (lambda: plan.Cluster.of("H100", spread="x"), "Cluster: spread: expected a number, got the str 'x'"),
        (lambda: plan.predict(GPT, plan.Layout(), H100), "predict: cluster: expected a plan.Cluster, got Layout"),
        (lambda: plan.predict(GPT, "H100", plan.Layout()), "predict: cluster: expected a plan.Cluster, got the str"),
        (lambda: plan.scaling(GPT, H100, plan.Layout(), 8), "scaling: ranks: expected a list of numbers of ranks, got"),
        (lambda: plan.scaling(GPT, H100, plan.Layout(), ("8",)), "scaling: ranks: expected an int, got the str '8'"),
        (lambda: plan.Model.from_config(None), "Model.from_config: config: expected a configuration of transformers"),
        (lambda: plan.Model.from_module(None), "Model.from_module: module: expected an nn.Module, got None"),
        (lambda: plan.calibrate("cpu", repeats="1"), "calibrate: repeats: expected an int, got the str '1'"),
        (lambda: plan.calibrate("cpu", sizes=3), "calibrate: sizes: expected a list of bytes, got the int 3"),
    ],
)
def test_wrong_types_are_named(call, words):
    with pytest.raises(TypeError) as error:
        call()
    assert str(error.value).startswith(words)


def calibrated(rank, world_size):
    found = []
    for per_host in (2, 1):
        cluster = plan.calibrate("cpu", ranks_per_host=per_host, matmul=64, sizes=(1 << 12, 1 << 20), repeats=2)
        numbers = [*dataclasses.astuple(cluster.gpu)[1:], cluster.network_bytes_per_s, cluster.link_latency_s]
        numbers += [cluster.network_latency_s, cluster.spread]
        for one in cluster.timed:  # what was timed is what is predicted
            assert cluster.collective_s(one.kind, one.tensor_bytes, ranks=2) == pytest.approx(one.seconds)
        found.append((numbers + [len(cluster.timed)], cluster.source, cluster.ranks_per_host))
    return found


def test_calibration_makes_one_cluster_of_two_ranks():
    first, second = run_ranks(calibrated, 2, timeout_s=300)
    assert first == second
    for (numbers, source, per_host), expected in zip(first, (2, 1), strict=True):
        assert per_host == expected
        assert all(n >= 0 for n in numbers) and all(n > 0 for n in numbers[:2])
        assert ("links of 2 ranks" in source) == (per_host == 2)
        assert ("network of 2 hosts" in source) == (per_host == 1)


def test_command_line(tmp_path, capsys):
    assert main(["plan", *SIZES, "--data", "64", "--scale", "--gpu", "A100"]) == 0
    out = capsys.readouterr().out
    assert "64 x A100" in out and "published runs" in out and "  8192 " in out
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "hidden_act": "silu", "hidden_size": 64, "vocab_size": 100,
                                  "num_hidden_layers": 2, "num_attention_heads": 4}))  # fmt: skip
    assert main(["plan", "--config", str(config), "--sequence", "32", "--no-overlap-data"]) == 0
    assert "1 x H100" in capsys.readouterr().out
    assert main(["plan", "--layers", "2"]) == 2
    assert capsys.readouterr().err == "plan: expected --config, or --hidden and the other sizes of a model\n"
    for text, words in (("{", "expected JSON in"), ("[1]", "expected a JSON object in")):
        config.write_text(text)
        assert main(["plan", "--config", str(config)]) == 2
        assert capsys.readouterr().err.startswith(f"plan: --config: {words} {config}")
    assert main(["plan", *SIZES, "--wire", "int8"]) == 2
    assert capsys.readouterr().err.startswith("plan: Layout: wire: expected one of")
