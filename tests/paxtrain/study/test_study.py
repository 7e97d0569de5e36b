"""The study: its measures against numpy and the plain model, its bytes against formulas, and its sentences."""

import csv
import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from compress import subspace
from paxtrain.data import token_files
from paxtrain.errors import UserError
from paxtrain.model import transformer
from paxtrain.model.tensor_parallel import WHOLE
from paxtrain.parallel.compiler_options import CPU_OPTIONS
from paxtrain.parallel.step import Trainer
from paxtrain.study import __main__ as study
from paxtrain.study import measurements, plots, report, runs, variants
from paxtrain.study.report import VariantResult
from tests import mains, small

# ml_collections loads configuration files with it.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")

# The options of a step, without LLVM's optimizations.
QUICK = CPU_OPTIONS | {"xla_backend_optimization_level": 0}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a small corpus."""
    return small.corpus(tmp_path_factory.mktemp("study"), 3_000)


def configuration(home=None, pipe=2, **sections):
    base = {
        "model": {"layers": pipe, "hidden": 16, "heads": 2, "sequence": 8, "dtype": "float32"},
        "mesh": {"data": 2, "pipe": pipe},
        "batch": {"global_batch": 12, "micro_batch": 2},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 1},
        "compress": {"backward_rank": 2, "forward_rank": 2, "data_stages": "0", "data_rank": 2, "data_rank_min": 2}
        | {"data_start": 0.5},
        "data": {name: str(home / "data" / name) for name in ("train", "validation")} if home else {},
        "run": {"steps": 4, "eval_every": 2, "eval_batches": 2},
    }
    return small.merged(base, sections)


# --- What is measured -------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def plain_boundary(config, params, tokens):
    """Return x [n, B, S, H] at the boundary of two stages of one layer each, and the loss's gradients by x.

    Args:
        tokens: [n, B, S + 1].
    """
    c = config.model

    def layer(i, x):
        return transformer.layer(jax.tree.map(lambda w: w[i], params["layers"]), x, c, WHOLE, None, i)[0]

    def loss(x, t):
        return transformer.head_loss(
            params["final_norm"], params["embedding"]["token"], layer(1, x), t[:, 1:], c, WHOLE
        )

    def one(t):
        x = layer(0, transformer.embed(params["embedding"], t[:, :-1], c, WHOLE))
        return x, jax.grad(loss)(x, t)

    return jax.vmap(one)(tokens)


def sent_low_rank(gradients, rank):
    """Return messages [n, rows, columns] as they arrive and the error of each, by QR in float64 with error feedback."""
    first = np.asarray(subspace.initial(gradients.shape[-1], rank, seed=0), np.float64)
    q, error, arrived, errors_left = first, 0, [], []
    for g in gradients:
        m = g + error
        p, upper = np.linalg.qr(m @ q)
        p *= np.sign(np.diagonal(upper))  # as Cholesky's
        w = m.T @ p
        arrived.append(p @ w.T)
        error = m - arrived[-1]
        errors_left.append(error)
        q = w / np.linalg.norm(w, axis=0) + 0.03 * first
    return np.stack(arrived), np.stack(errors_left)


@pytest.mark.once
def test_errors_and_cosines_are_those_of_numpy():
    """Gradients from the plain model, compressed in numpy, equal those that the links of the virtual mesh record."""
    compress = {"backward_messages": "all", "error": "explicit"}
    config = configuration(compress=compress)
    trainer = small.emulated(config, record=12)
    tokens = np.random.default_rng(0).integers(0, 257, (12, 9), dtype=np.int32)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(0, 0.2, x.shape).astype(np.float32), transformer.shapes(config.model))
    state = trainer.from_params(params)
    step = jax.jit(trainer.loss_and_gradients, compiler_options=QUICK)
    codec = jax.device_get(step(state.params, tokens, None, state.codec)[2])
    rows = measurements.link_errors(trainer, codec)
    assert len(rows) == 2 * 3  # data ranks x micro-batches, of one link

    plain = [a.reshape(2, 3, 16, 16) for a in plain_boundary(config, params, tokens.reshape(6, 2, 9))]
    plain[1] /= 3  # the step's loss is the mean over micro-batches
    for rank in range(2):
        x, g = (np.asarray(a[rank], np.float64).reshape(3, 16, 16) for a in plain)
        arrived, error = sent_low_rank(g, 2)
        lost = arrived - g
        own = [row for row in rows if row["data_rank"] == rank]
        wrong, right = (np.cumsum([a.T @ b for a, b in zip(some, x)], axis=0) for some in (lost, g))
        for i, row in enumerate(own):
            assert (row["direction"], row["link"], row["micro_batch"]) == ("backward", 0, i)
            expected = np.linalg.norm(lost[i]) / np.linalg.norm(g[i])
            assert expected > 0.1
            assert row["relative_error"] == pytest.approx(expected, rel=1e-3)
            assert row["weight_error"] == pytest.approx(np.linalg.norm(wrong[i]) / np.linalg.norm(right[i]), rel=1e-3)
            assert ("cosine" in row) == (i < 2)
            if i < 2:
                change = x[i] - x[i + 1]
                cosine = (error[i] * change).sum() / np.linalg.norm(error[i]) / np.linalg.norm(change)
                assert row["cosine"] == pytest.approx(cosine, abs=1e-4)
                assert row["change_mean"] == pytest.approx(change.mean() / np.sqrt((change**2).mean()), abs=1e-5)
                assert row["error_mean"] == pytest.approx(error[i].mean() / np.sqrt((error[i] ** 2).mean()), abs=1e-5)

    # The spectra of the recorded gradients and of the layers' weights are numpy's too.
    [found] = measurements.activation_gradient_spectra(trainer, codec).values()
    values = np.linalg.svd(plain[1].reshape(6, 16, 16), compute_uv=False)
    np.testing.assert_allclose(found, (values / values[:, :1]).mean(0), atol=1e-4)
    grads = jax.jit(jax.grad(functools.partial(transformer.loss, config=config.model)))(params, tokens)
    found = measurements.weight_gradient_spectra(trainer, state.params, tokens)
    values = np.linalg.svd(grads["layers"]["qkv"]["kernel"].reshape(2, 16, 48), compute_uv=False)
    assert sorted(found) == ["down", "out", "qkv", "up"]
    np.testing.assert_allclose(found["qkv"], (values / values[:, :1]).mean(0), atol=1e-4)


def test_without_error_feedback_an_error_is_what_was_lost():
    given, decoded = np.random.default_rng(0).normal(size=(2, 2, 1, 4, 4))
    kept = measurements.Messages([0, 1], given, decoded, error=0 * given)
    lost = kept._replace(error=given - decoded)
    x = np.random.default_rng(1).normal(size=(2, 1, 4, 4))
    [row, _] = measurements.message_errors(lost, x)
    change, error = (x[0] - x[1]).ravel(), (given - decoded)[0].ravel()
    assert row["cosine"] == pytest.approx(np.corrcoef(np.r_[error, -error], np.r_[change, -change])[0, 1])
    assert math.isnan(next(iter(measurements.message_errors(kept, x)))["cosine"])


# --- A study ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compile_step():
    """Return `Trainer.compile_step` that compiles each step once for all of this file's studies."""
    return functools.cache(Trainer.compile_step)


def finished(home, out, resume=False):
    config = variants.settled(configuration(home, batch={"global_batch": 8}))
    chosen = variants.chosen(config, [2], ["dense", "cb_fe_sc"])
    small = runs.Study(config, str(out), 1, chosen, real_mesh=False, resume=resume)
    outcomes = small.run(workers=2)
    report.write_csv(outcomes, out)
    return config, outcomes


@pytest.mark.slow
def test_a_study_is_deterministic_and_trains_as_training_does(home, tmp_path, monkeypatch, compile_step):
    # The test is not about compilation, so each program is compiled once and without optimization.
    monkeypatch.setattr(Trainer, "compiler_options", QUICK)
    monkeypatch.setattr(Trainer, "compile_step", compile_step)
    monkeypatch.setattr(measurements, "asked", lambda trainer: [])  # so nothing is traced for the bytes
    monkeypatch.setattr(
        measurements, "wire_bytes", lambda trainer, _: dict.fromkeys(measurements.BYTES, trainer.record + 7)
    )
    config, outcomes = finished(home, tmp_path / "one")
    finished(home, tmp_path / "two")
    names = {"study.csv", "losses.csv", "errors.csv", "spectra.csv"}
    assert {path.name for path in (tmp_path / "one").iterdir()} == names | {"finished.jsonl"}
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()

    dense, compressed = outcomes
    file = token_files.load(config.data.train, vocab_size=257, sequence=8)
    batch = next(token_files.batches(file, sequence=8, global_batch=8, rows=range(8), seed=0))
    params = jax.jit(lambda key: transformer.init(config.model, key))(jax.random.key(0))
    assert dense.losses[0] == pytest.approx(float(transformer.loss(params, batch, config.model)), rel=1e-5)
    assert dense.losses[0] == pytest.approx(compressed.losses[0], rel=1e-5)
    assert dense.losses[-1] != compressed.losses[-1]
    assert [len(o.losses) for o in outcomes] == [4, 4]
    assert list(dense.validation) == [0, 2, 4]
    assert dense.final < dense.validation[0]

    with (tmp_path / "one" / "study.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [row["run"] for row in rows] == ["dense", "cb_fe_sc"]
    assert float(rows[1]["percent_above_dense"]) == pytest.approx(100 * (compressed.final / dense.final - 1), abs=1e-4)
    assert int(rows[0]["bytes"]) == 7 * len(measurements.BYTES)
    with (tmp_path / "one" / "errors.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    # There is one link, and the epilogue compresses one of its two micro-batches.
    assert {(row["run"], row["link"], row["micro_batch"]) for row in rows} == {("cb_fe_sc", "0", "1")}
    assert {row["step"] for row in rows} == {"1", "2", "3", "4"}

    # Another start takes the run that has finished, and trains the other one to the same numbers.
    lines = (tmp_path / "two" / "finished.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "two" / "finished.jsonl").write_text(next(line for line in lines if '"name": "dense"' in line))
    began, run = list[str](), runs.Study._run

    def watched(self, variant, *rest):
        began.append(variant.name)
        return run(self, variant, *rest)

    monkeypatch.setattr(runs.Study, "_run", watched)
    finished(home, tmp_path / "two", resume=True)
    assert began == ["cb_fe_sc"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_runs_are_on_disk_before_bytes_are_counted(home, tmp_path, monkeypatch):
    """If counting fails, nothing that has finished is lost."""
    config = variants.settled(configuration(home))
    small = runs.Study(config, str(tmp_path), 2, variants.chosen(config, [2], ["dense"]), real_mesh=False)
    monkeypatch.setattr(runs.Study, "_compile_evaluation", lambda self: None)
    monkeypatch.setattr(runs.Study, "_step", lambda self, trainer, ranks: None)
    result = functools.partial(VariantResult, "dense", "dense", rank=0, bytes={}, validation={4: 2.5})
    monkeypatch.setattr(runs.Study, "_run", lambda self, variant, trainer, step_of, seed: result(seed=seed))

    def fail(*_):
        raise ValueError("no bytes")

    monkeypatch.setattr(measurements, "wire_bytes", fail)
    with pytest.raises(ValueError, match="no bytes"):
        small.run(workers=1)
    again = runs.Study(config, str(tmp_path), 2, small.variants, real_mesh=False, resume=True)
    monkeypatch.setattr(measurements, "wire_bytes", lambda *_: {"forward": 7})
    monkeypatch.setattr(runs.Study, "_run", fail)
    assert [(o.seed, o.final, o.bytes) for o in again.run(workers=1)] == [(n, 2.5, {"forward": 7}) for n in (0, 1)]


@pytest.mark.slow
def test_a_fused_embedding_computes_what_one_does_that_is_not(home, tmp_path, monkeypatch):
    """They differ in rounding, so the study trains once for both, and counts their bytes apart."""
    config = variants.settled(configuration(home))
    chosen = variants.chosen(config, [], ["cb_epilogue", "cb_fe", "cb"])
    small = runs.Study(config, str(tmp_path), 1, chosen, real_mesh=False)
    unfused, fused, other = (small.trainer(variant) for variant in small.variants)
    batch = next(small.batches("train", 0))

    def ended(trainer):
        state = trainer.init(0)
        for _ in range(2):
            state, values = trainer.compile_step()(state, batch)
        return jax.device_get((values["loss"], state.params))

    monkeypatch.setattr(Trainer, "compiler_options", QUICK)
    monkeypatch.setattr(Trainer, "compile_step", functools.cache(Trainer.compile_step))
    (loss, params), (same, there), (another, _) = map(ended, (unfused, fused, other))
    assert same == pytest.approx(loss, rel=1e-6)
    assert another != pytest.approx(loss, rel=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), there, params)

    trained = []

    def train(variant):
        trained.append(variant.name)
        return [VariantResult(variant.name, variant.label, 0, 0, {})]

    monkeypatch.setattr(small, "_train", train)
    monkeypatch.setattr(small, "_compile_evaluation", lambda: None)
    monkeypatch.setattr(small, "_count", lambda variant: {"embedding": 7 + (variant.name == "cb_fe")})
    outcomes = small.run(workers=1)
    assert trained == ["cb_epilogue", "cb"]
    assert [(o.name, o.bytes["embedding"]) for o in outcomes] == [("cb_epilogue", 7), ("cb_fe", 8), ("cb", 7)]


CODECS = {
    "backward_codec": "int8",
    "backward_options": {"block": 16},
    "data_codec": "topk",
    "data_options": {"share": 0.2},
    "weights_codec": "int8",
}


def test_codecs_of_the_configuration_have_a_variant_each():
    config = configuration(compress=CODECS)
    found = {variant.name: variant for variant in variants.variants(config, [2])}
    own = {name: variant.config.compress for name, variant in found.items() if name.startswith("codec_")}
    assert {name: variant.label for name, variant in found.items() if name in own} == {
        "codec_backward": "int8 gradients",
        "codec_data": "topk over data",
        "codec_weights": "int8 weights",
    }
    assert own["codec_backward"].backward.options == {"block": 16} and own["codec_backward"].data.codec == ""
    assert (own["codec_data"].data.chosen, own["codec_data"].backward.chosen) == ("0", "none")
    assert own["codec_weights"].weights.codec == "int8" and own["codec_weights"].data.chosen == "none"
    others = [variant.config.compress for name, variant in found.items() if name not in own]
    assert all(c.backward.low_rank and c.data.low_rank and not c.weights.codec for c in others)


@pytest.mark.slow
def test_a_study_trains_with_codecs(home, tmp_path, monkeypatch, compile_step):
    monkeypatch.setattr(Trainer, "compiler_options", QUICK)
    monkeypatch.setattr(Trainer, "compile_step", compile_step)
    config = configuration(home, compress=CODECS, batch={"global_batch": 8})
    chosen = variants.chosen(config, [2], ["dense", "codec_backward", "codec_data"])
    small = runs.Study(config, str(tmp_path), 1, chosen, real_mesh=False)
    dense, between, over = small.run(workers=2)
    assert between.losses[0] == pytest.approx(dense.losses[0], rel=1e-6)
    assert 1e-7 < abs(between.final / dense.final - 1) < 0.02 and between.rank == 0
    assert over.final != dense.final
    assert between.bytes["backward"] < dense.bytes["backward"] / 3
    assert over.bytes["reduce-scatter"] < between.bytes["reduce-scatter"]  # with the embedding's in both
    errors = [row["relative_error"] for row in between.errors]
    assert errors and 0 < max(errors) < 0.02  # of 8 bits


# --- Words and pictures -----------------------------------------------------------------------------------------------

LOSSES = {
    "dense": (2.0, 2.02),
    "cb_naive": (2.2, 2.2),
    "cb": (2.05, 2.06),
    "cb_epilogue": (2.012, 2.03),
    "cb_fe": (2.0121, 2.03),
    "cb_fe_sc": (2.01, 2.025),
    "everything": (2.3, 2.02),
    "cb_rank_4": (2.1, 2.1),
}


LABELS = {"cb_naive": "CB naive", "cb": "CB", "cb_epilogue": "CB epilogue", "cb_fe": "CB + FE"}
LABELS |= {"cb_fe_sc": "CB + FE + SC", "cb_rank_4": "CB rank 4", "codec_backward": "int8 gradients"}
CODEC_LOSSES = {"codec_backward": (2.0, 2.02), "codec_data": (2.5, 2.5)}


def made_up(cosine=0.01, seeds=2, **losses):
    """Return outcomes of all runs, whose final losses are those of LOSSES, except the given ones."""
    outcomes = []
    for name, finals in (LOSSES | losses).items():
        kind = LABELS.get(name, name)
        for seed, final in enumerate(finals[:seeds]):
            sent = {what: 1000 * n for n, what in enumerate(measurements.BYTES, 1)}
            sent["embedding"] -= 2000 * (name == "cb_fe")
            o = VariantResult(name, kind, seed, 4 if name == "cb_rank_4" else 8, sent)
            o.losses = list(np.linspace(5, 2, 40))
            o.validation = {0: 5.0, 20: 3.0, 40: final}
            if name != "dense":
                o.errors = [
                    {"step": step, "direction": "backward", "link": link, "data_rank": 0, "micro_batch": 0}
                    | {"relative_error": 0.3 if name == "cb" else 0.2, "weight_error": 0.15}
                    | {"cosine": cosine * (link - 1), "error_mean": 1e-9, "change_mean": 0.01 * (link - 1)}
                    for step in (1, 20, 40)
                    for link in range(3)
                ]
            else:
                o.spectra = [
                    {"step": step, "gradients_of": kind, "matrix": "m", "index": i, "singular_value": 2.0**-i}
                    for step in (4, 40)
                    for kind in ("activations", "weights")
                    for i in range(16)
                ]
            outcomes.append(o)
    return outcomes


# Losses by hand: what the sentences then say, besides those that stay as they are.
OTHERWISE = {
    "CB + FE + SC ends below dense": {"cb_fe_sc": (1.9, 1.9)},
    "compression of everything diverges": {"everything": (2.0, math.nan)},
    "CB is worse than naive": {"cb": (2.3, 2.3)},
    "CB is now worse, now better than naive": {"cb": (2.1, 2.31)},
    "CB is like naive": {"cb": (2.2001, 2.2)},
    "errors are correlated": {"cosine": 0.5},
    "there are no errors": {"cosine": math.nan},
    "fusing changes the loss": {"cb_fe": (2.1, 2.03)},
}


def test_sentences_tell_the_truth(snapshot):
    usual, lines = report.claims(made_up()), list[str]()
    for what, changes in OTHERWISE.items():
        lines += [f"{what}:", *(f"- {one}" for one in report.claims(made_up(**changes)) if one not in usual)]
    snapshot("claims.txt", "\n".join(lines))


@pytest.mark.parametrize(("seeds", "cosine", "more"), [(1, math.nan, {}), (2, 0.01, CODEC_LOSSES)])
def test_the_page_has_every_figure(tmp_path, snapshot, seeds, cosine, more):
    """Losses are those of LOSSES over 2.0 and 2.02, messages 21 kB, and 19 with a fused embedding."""
    config, outcomes = configuration(compress=CODECS if more else {}), made_up(seeds=seeds, cosine=cosine, **more)
    figures = plots.draw(config, outcomes, tmp_path)
    report.write_page(config, outcomes, figures, tmp_path)
    assert len(figures) == 5
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in figures)
    snapshot(f"study_{seeds}.md", (tmp_path / report.PAGE).read_text())


# --- Bad input --------------------------------------------------------------------------------------------------------

BAD = {
    "no messages": ({"mesh": {"pipe": 1}, "model": {"layers": 1}}, ["mesh.pipe=1", "2 or more"]),
    "tensor": ({"mesh": {"tensor": 2}}, ["1 of mesh.context, mesh.tensor, ", "got mesh.tensor=2; leave it out"]),
    "context": ({"mesh": {"context": 2}}, ["got mesh.context=2; leave it out"]),
    "one micro-batch": ({"batch": {"global_batch": 4}}, ["there is 1", "batch.global_batch=8"]),
    "adaptive ranks": ({"compress": {"data_adapt_every": 5}}, ["compress.data.adapt_every=5"]),
    "no stages": (
        {"compress": {"data_stages": "none"}},
        ["compress.data.stages=none", "--config.compress.data.stages=0,1"],
    ),
    "stages to be measured": ({"compress": {"data_stages": "selective"}}, ["compress.data.stages=selective"]),
}


@pytest.mark.parametrize(("changes", "words"), BAD.values(), ids=BAD.keys())
def test_configurations_with_nothing_to_compare(changes, words):
    with pytest.raises(UserError) as error:
        variants.settled(configuration(**changes))
    assert all(word in str(error.value) for word in words), error.value


def test_given_times_choose_the_stages():
    times = {"data_stage_seconds": "1.0,0.2", "data_reduce_seconds": "0.5,0.5", "data_compressed_seconds": "0.1,0.1"}
    chosen = variants.settled(configuration(compress={"data_stages": "selective", **times}))
    assert chosen.compress.data.stages == "0"
    assert (
        chosen.compress.changed(data={"stages": "selective"})
        == configuration(compress={"data_stages": "selective", **times}).compress
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds=0"], ["--seeds must be at least 1, got 0"]),
        (["--ranks=2,x"], ["--ranks must be numbers", "2,x"]),
        (["--ranks=2,60"], ["compress.backward.rank=60", "the largest useful rank is 21"]),
        (["--config.compress.data.rank=60"], ["compress.data.rank=60", "the largest useful rank is 25"]),
        (["--config.data.train=nowhere/train"], ["nowhere/train", "paxtrain.prepare"]),
        (["--steps=10"], ["optimizer.warmup_steps=40", "run.steps=10"]),
        (["--out=/dev/null/x"], ["cannot write to /dev/null/x"]),
        (["study"], ["unexpected argument 'study'"]),
        (["--frontier", "--axes=time"], ["--axes must be some of between, data, activations, got 'time'"]),
        (["--frontier", "--codecs=int5"], ["--codecs must be some of int8, fp8", "got 'int5'"]),
        (["--config.compress.colour=3"], ["compress.colour"]),
        (["--config.init=a_model"], ["begins with each seed's weights", "init=a_model; leave it out"]),
        (["--config.mesh.data=32768", "--config.batch.global_batch=524288"], ["devices, and a study traces", "1,024"]),
    ],
)
def test_bad_flags_are_one_sentence_before_anything_is_compiled(home, tmp_path, monkeypatch, capfd, arguments, words):
    def compiles(_):
        pytest.fail("something is compiled before the input is known to be good")

    for name in ("step", "evaluate"):
        monkeypatch.setattr(Trainer, name, property(compiles))
    files = [f"--config.data.{name}={home / 'data' / name}" for name in ("train", "validation")]
    config = f"--config={study.__file__.replace('paxtrain/study/__main__.py', 'configs/study.py')}"
    assert mains.run(monkeypatch, study, config, f"--out={tmp_path / 'out'}", *files, *arguments) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert all(word in captured.err for word in words), captured.err
    assert not (tmp_path / "out").exists()


def test_every_variant_has_a_color_and_a_place_in_the_plots():
    places = ("backward", "forward", "data", "weights", "embedding")
    config = configuration()
    config = dataclasses.replace(
        config, compress=config.compress.changed(**{place: {"codec": "int8"} for place in places})
    )
    names = [variant.name for variant in variants.variants(config, [7])]
    assert {f"codec_{place}" for place in places} <= set(names)
    assert sorted(plots._ordered(dict.fromkeys(names))) == sorted(names) and names[-1] == "cb_rank_7"
    assert [name for name in names if name not in plots._COLORS] == ["cb_rank_7"]
