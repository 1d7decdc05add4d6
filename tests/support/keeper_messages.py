"""Arbitrary messages between a rank and its keeper."""

from typing import get_args

from hypothesis import strategies as st

from safepoint.checkpoint.format.manifest import MAX_STEP, ManifestFacts, Trigger
from safepoint.snapshot.images.torch_archive import Archive
from safepoint.snapshot.memory.block import PAGE_BYTES
from safepoint.snapshot.protocol import messages

NUMBERS = st.integers(0, (1 << 63) - 1)
REALS = st.floats(0, allow_nan=False, allow_infinity=False)
TEXTS = st.text(max_size=20)
NAMES = st.text("abc.-é", min_size=1, max_size=8).map(lambda text: f"f{text}")
FOLDERS = NAMES.map(lambda name: f"/{name}")
DIGEST = "xxh3-128:" + "0" * 32
BASES = st.fixed_dictionaries({"name": TEXTS, "revision": TEXTS, "digest": st.just(DIGEST)})
TRIGGERS = st.sampled_from(Trigger)

FACTS = st.builds(
    ManifestFacts,
    run_id=st.text("abc012-_", max_size=20).map(lambda text: f"r{text}"),
    attempt=st.integers(1, 99),
    step=st.integers(0, MAX_STEP),
    epoch=st.floats(0, 1e18),
    world_size=st.integers(1, 99),
    global_batch=st.integers(1, 99),
    gradient_accumulation=st.integers(1, 99),
    samples_seen=NUMBERS,
    strategy=TEXTS,
    zero_stage=st.none() | st.integers(0, 3),
    libraries=st.dictionaries(TEXTS, TEXTS, max_size=3),
    metrics=st.dictionaries(TEXTS, REALS, max_size=3),
    base=st.none() | BASES,
)
CHECKPOINTS = st.builds(
    messages.CheckpointFacts,
    manifest=FACTS,
    folder=FOLDERS,
    attempt_id=NAMES,
    keep=st.none() | TEXTS,
    limit=st.none() | NUMBERS,
    protected=st.lists(NUMBERS, max_size=3).map(tuple),
    save=NUMBERS,
    node=st.integers(0, 3),
    num_nodes=st.integers(4, 9),
)
ARCHIVES = st.builds(Archive, begin=NUMBERS, directory=NUMBERS, num_entries=NUMBERS)
FILES = st.builds(
    messages.StagedFile,
    path=NAMES,
    block=NUMBERS,
    offset=NUMBERS,
    size_bytes=NUMBERS,
    archives=st.lists(ARCHIVES, max_size=2).map(tuple),
)
OUTCOMES = st.builds(
    messages.Outcome, step=NUMBERS, error=TEXTS, path=TEXTS, size_bytes=NUMBERS, write_s=REALS, ended_s=REALS
)
EARLIER = st.builds(messages.EarlierSnapshot, folder=TEXTS, manifest=TEXTS, is_durable=st.booleans())
LISTS = st.lists(NUMBERS, max_size=3).map(tuple)
RANK_MESSAGES: dict[type, st.SearchStrategy[messages.RankMessage]] = {
    messages.Hello: st.builds(messages.Hello, rank=NUMBERS, num_ranks=st.integers(1, 99), restart=NUMBERS),
    messages.LendBlock: st.builds(
        messages.LendBlock, number=NUMBERS, capacity_bytes=st.integers(1, 99).map(lambda pages: pages * PAGE_BYTES)
    ),
    messages.BlockPopulated: st.builds(messages.BlockPopulated, number=NUMBERS),
    messages.ReturnBlock: st.builds(messages.ReturnBlock, number=NUMBERS),
    messages.OverwriteBlocks: st.builds(messages.OverwriteBlocks, numbers=LISTS),
    messages.BeginSnapshot: st.builds(
        messages.BeginSnapshot,
        step=NUMBERS,
        number=NUMBERS,
        request=NUMBERS,
        files=st.lists(FILES, max_size=3).map(tuple),
        trigger=TRIGGERS,
        is_requested=st.booleans(),
        facts=st.none() | CHECKPOINTS,
    ),
    messages.SnapshotStaged: st.builds(messages.SnapshotStaged, step=NUMBERS),
    messages.CancelSnapshot: st.builds(messages.CancelSnapshot, step=NUMBERS, number=NUMBERS),
    messages.RequestSave: st.builds(messages.RequestSave, step=NUMBERS, trigger=TRIGGERS, request=NUMBERS),
    messages.OpenFolder: st.builds(messages.OpenFolder, folder=FOLDERS, is_committer=st.booleans()),
    messages.CloseFolder: st.builds(messages.CloseFolder),
    messages.FindEarlierSnapshot: st.builds(messages.FindEarlierSnapshot),
    messages.ReleaseEarlierSnapshot: st.builds(messages.ReleaseEarlierSnapshot),
    messages.AbandonStep: st.builds(messages.AbandonStep, step=NUMBERS, reason=TEXTS),
    messages.RemoveAtExit: st.builds(messages.RemoveAtExit, folder=NAMES.map(lambda name: f"/tmp/scratch-{name}")),
    messages.Goodbye: st.builds(messages.Goodbye),
}
KEEPER_MESSAGES: dict[type, st.SearchStrategy[messages.KeeperMessage]] = {
    messages.Welcome: st.builds(messages.Welcome, pid=NUMBERS),
    messages.Refused: st.builds(messages.Refused, reason=TEXTS),
    messages.BlocksFree: st.builds(messages.BlocksFree, numbers=LISTS),
    messages.SaveEnded: st.builds(messages.SaveEnded, request=NUMBERS, outcome=OUTCOMES),
    messages.Answer: st.builds(messages.Answer, error=TEXTS, snapshot=st.none() | EARLIER),
    messages.Leave: st.builds(messages.Leave, step=st.none() | NUMBERS, abandoned_step=NUMBERS, reason=TEXTS),
}
assert set(RANK_MESSAGES) == set(get_args(messages.RankMessage))
assert set(KEEPER_MESSAGES) == set(get_args(messages.KeeperMessage))
