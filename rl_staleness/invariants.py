"""What a sound run keeps, and what is worth a word: one entry a name, for `rl-staleness doctor`.

*Broken*: facts that cannot all be true, tokens or lines that are missing from the trace. No number
of the run can be relied on without looking there. *Noted*: every number is right as it stands,
with its bounds; something could be better known, or the run be better off.
"""

from __future__ import annotations

import msgspec

__all__ = ["Invariant", "invariant"]


class Invariant(msgspec.Struct, frozen=True):
    """What it means that a name is found in a trace."""

    meaning: str
    cause: str
    """The usual one."""
    way_out: str
    broken: bool = True
    """False: it is noted."""


def invariant(name: str) -> Invariant:
    """What a name means; names that trainers and integrations give are violations too."""
    return NOTED.get(name) or BROKEN.get(name) or _TOLD


_TOLD = Invariant(
    "the trainer, or an integration, told of facts that cannot all be true",
    "see its detail",
    "see the documentation of what wrote it",
)

_REFITS = "call on_refit_paused once and then on_refit_done or on_refit_aborted once, in that order"
_COUNT = "let the callback count, or pass updates=, version= and step= of on_step in its units"
_STAMP = "stamp calls with the engine's version in policy updates, read as the call begins"
_CUTS = "count each running call at the pause, before the weights move and before it resumes"

BROKEN: dict[str, Invariant] = {
    "negative_age": Invariant(
        "a token is younger than the update that consumed it",
        "on_step was called before the update was counted, or versions are of another unit",
        _COUNT,
    ),
    "step_version": Invariant(
        "a step's version is not the number of updates so far",
        "the trainer counts steps, syncs or samples, or steps were not told of",
        _COUNT,
    ),
    "step_number": Invariant(
        "a step's number is not the one that follows",
        "a step was left out, told of twice, or made again after a resume",
        _COUNT,
    ),
    "unknown_group": Invariant(
        "a step trained a group that was not waiting: its tokens are not known",
        "it was not published, dropped before, or trained before and not in kept=",
        "call on_publish before a trainer can take a group; name groups that are used again in"
        " kept=",
    ),
    "published_again": Invariant(
        "a group was published while one of its name was waiting; the later one counts",
        "two groups have one name, or a retry publishes again",
        "give each group its own name; drop the first one",
    ),
    "call_named_twice": Invariant(
        "two calls of a group have one name",
        "the n completions of a request share its id",
        "make each completion a call with a name of its own",
    ),
    "stamp": Invariant(
        "a call's stamp is a version that its engine did not have",
        "the stamp is the policy's or the trainer's version, or the engine went on with old"
        " weights",
        _STAMP,
    ),
    "after_contradicts_cut": Invariant(
        "a call began after a refit whose cut lists it",
        "`after` was read later than the call began",
        "read last_refit() before the request is submitted",
    ),
    "until_contradicts_cut": Invariant(
        "a call ended before a refit whose cut lists it",
        "`until` was read from another engine, or the cut lists calls that had ended",
        _CUTS,
    ),
    "after_beyond_until": Invariant(
        "a call began after a refit that lies behind its end",
        "`after` and `until` were read from different engines",
        "read last_refit(engine) of the call's own engine",
    ),
    "absent_from_cut": Invariant(
        "a call is in earlier and later cuts of its engine and not in an exact one between",
        "the cut was counted while calls were being added, or lists part of them",
        "write such a cut with exact=False, or count in the engine's own thread",
    ),
    "cut_counts_fall": Invariant(
        "a call has fewer tokens at a later cut",
        "counts of a client that lags behind its engine, or a call's name was used twice",
        _CUTS,
    ),
    "spans_overlap": Invariant(
        "the engine says two versions of one token",
        "spans of several attempts were put together without moving their places",
        "make every attempt a call of its own",
    ),
    "span_contradicts_cut": Invariant(
        "the engine's own span and the exact cut differ on a token",
        "the label was set before or after the weights moved, or the cut was taken elsewhere",
        "set the engine's weight version inside the refit, before generation resumes",
    ),
    "mask_beyond_call": Invariant(
        "a loss mask reaches beyond its call",
        "it counts prompt or padding tokens",
        "give ranges of the call's own output tokens, from 0",
    ),
    "mask_of_unknown_call": Invariant(
        "a loss mask names a call that the group does not list",
        "the call was summed when its group was published",
        "make the callback with late_masks=True, or pass the mask to on_publish",
    ),
    "mask_of_unknown_group": Invariant(
        "a loss mask names a group that the step did not train",
        "masks of another step",
        "pass the masks of the groups that on_step names",
    ),
    "calls_running": Invariant(
        "a group was published while calls of it were running",
        "a request was not awaited, or cancelled without its end being seen",
        "publish when every call of the group has ended",
    ),
    "engine_version_back": Invariant(
        "an engine went back to an older version",
        "an older checkpoint was pushed, or versions are of another unit",
        "pass version= in policy updates; resume the run for a rollback",
    ),
    "engine_version_beyond_policy": Invariant(
        "an engine was moved to a version that the policy has not reached",
        "on_refit_done was called before on_step, or steps make several updates and say one",
        "call on_step right after the update and before the refit; pass updates=",
    ),
    "refit_version": Invariant(
        "two lines of one refit say different versions; the later one counts",
        "on_refit_done(version=) differs from on_refit_paused(version=)",
        "pass one version for one refit",
    ),
    "refit_done_and_aborted": Invariant(
        "a refit was done and aborted; the later line counts", "both hooks were called", _REFITS
    ),
    "refit_left_open": Invariant(
        "a refit began while the one before was neither done nor aborted",
        "an exception between the hooks",
        "use `with staleness.refit():`, which aborts when its block raises",
    ),
    "refit_done_without_pause": Invariant(
        "a refit was done that nobody announced: it has no cut", "a hook is missing", _REFITS
    ),
    "refit_aborted_without_pause": Invariant(
        "a refit was aborted that nobody announced", "a hook is missing", _REFITS
    ),
    "run_changed": Invariant(
        "lines of another run stand in the trace",
        "two traces were joined",
        "keep one run a file",
    ),
    "incarnation": Invariant(
        "a start of the run is missing, or stands twice",
        "two processes wrote one trace, or lines were cut out",
        "let one process write a run",
    ),
    "counter_restarted": Invariant(
        "the trainer's own count starts again after a resume; it is translated from there on",
        "the trainer counts from the start of its process",
        "pass version= in policy updates of the whole run, or none",
    ),
    "beyond_resume": Invariant(
        "tokens of a version that the run never had: it went on from an older one",
        "a rollback to an older checkpoint, and groups or engines of the part that was undone",
        "drop such groups, and push the weights to every engine at a resume",
    ),
    "lines_lost": Invariant(
        "lines could not be written: what they said is in no number",
        "the disk was full",
        "free the disk; numbers until the next refit of each engine have bounds",
    ),
    "line_after_end": Invariant(
        "lines stand behind the end of the run without a new start",
        "hooks were called after close(), or files were joined",
        "close the callback last",
    ),
    "tokens_beyond_generated": Invariant(
        "groups hold more tokens than their engines have generated",
        "a call was published in two groups, tokens are counted twice, or tool and prompt tokens"
        " are counted as generated",
        "publish each call once, with the tokens that its engine generated",
    ),
}


def _noted(meaning: str, cause: str, way_out: str) -> Invariant:
    return Invariant(meaning, cause, way_out, broken=False)


NOTED: dict[str, Invariant] = {
    "torn_line": _noted(
        "the last line is torn: the process died as it wrote it, or writes it now",
        "a crash",
        "nothing: the next start of the run cuts it off",
    ),
    "line_cut_off": _noted("a torn last line was cut off as the run went on", "a crash", "nothing"),
    "unfinished": _noted(
        "the trace has no end: the run goes on, or its process died",
        "close() was not called",
        "use the callback as a context manager",
    ),
    "clock_back": _noted(
        "the clock went back by more than a second between two lines; no age is made of times",
        "the machine's time was set, or another machine went on with the run",
        "nothing",
    ),
    "refit_without_cut": _noted(
        "a refit was done and no count says where running calls were: bounds",
        "the engine did not answer, is not attached, or no cuts= were passed",
        "attach the engine, or pass cuts= to on_refit_paused",
    ),
    "inexact_cut": _noted(
        "a cut says the least number of tokens only: bounds",
        "the engine was counted while it generated",
        "pause before counting",
    ),
    "refit_unsettled": _noted(
        "a refit was neither done nor aborted and may have happened: bounds",
        "the process died in it, or a hook is missing",
        _REFITS,
    ),
    "refit_not_repeated": _noted(
        "the last refit of an engine was aborted: it goes on with old weights",
        "the transfer of weights failed and was not tried again",
        "repeat the refit",
    ),
    "engine_never_refitted": _noted(
        "an engine made tokens, and kept the version that it started with for the whole run",
        "its refits are not told of, or it gets none",
        "name every engine in the refit hooks",
    ),
    "refits_stopped": _noted(
        "no refit was done for many more steps than ever before: engines go on with old weights",
        "the transfer of weights hangs or fails",
        "look at the engine's log",
    ),
    "uncovered_tokens": _noted(
        "tokens were trained whose version is not certain: see age_lo and age_hi",
        "see its detail",
        "see refit_without_cut, inexact_cut, refit_unsettled",
    ),
    "unknown_tokens": _noted(
        "tokens were trained that no call made",
        "end tokens that the trainer appended",
        "nothing, if that is so",
    ),
    "orphans": _noted(
        "calls that a cut lists were never published and are forgotten",
        "requests that were cancelled, or calls of groups that nobody published or dropped",
        "publish or drop every group; a higher orphan_after where calls run that long",
    ),
    "groups_discarded": _noted(
        "groups waited at a resume and were not published again after it",
        "the buffer was not in the trainer's checkpoint",
        "publish restored groups with restored=True",
    ),
    "groups_never_trained": _noted(
        "groups are published and wait as the run ends",
        "the buffer was not empty at the end, or groups are thrown away without on_drop",
        "call on_drop(group, reason=...)",
    ),
    "steps_made_again": _noted(
        "a resume went back before steps that the trace holds: the totals here count both parts",
        "the run went on from an older checkpoint",
        "nothing: reports show the later part",
    ),
    "step_without_tokens": _noted(
        "a step trained no token", "every group was masked or empty", "look at the loss masks"
    ),
}
