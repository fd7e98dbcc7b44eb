"""On-policy distillation of slime as keys: a teacher of the trainer, or a server that its reward function asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from rlscale.migration.argument_tables import TableRow
from rlscale.migration.findings import Kind
from rlscale.migration.foreign_arguments import Argument
from rlscale.migration.settings import Setting
from rlscale.migration.shell_values import Text, template_of, value_of
from rlscale.migration.translation_draft import Conversion, TranslationDraft

ESTIMATOR = "on_policy_distillation"
"""Until v0.2.2 distillation was an advantage estimator: the logprob of the teacher minus that of the policy."""

ENDPOINT = "/generate"
_MODULES = ("slime.rollout.on_policy_distillation", "examples.on_policy_distillation.on_policy_distillation")
REWARDS = frozenset(f"{module}.reward_func" for module in _MODULES)
POST_PROCESSES = frozenset(f"{module}.post_process_rewards" for module in _MODULES)
_SERVER = "model.teacher_url names the server, which the run asks itself"


def _value(draft: TranslationDraft, name: str) -> str:
    argument = draft.given(name)
    return "" if argument is None else argument.value.replace(":", ".")


def is_served(draft: TranslationDraft) -> bool:
    """Whether a server has the teacher."""
    if _value(draft, "--advantage-estimator") == ESTIMATOR:
        return True
    kind = _value(draft, "--opd-type")
    # A variable may hold the type; slime's reward function has no other use.
    is_unknown = kind != "megatron" and _value(draft, "--custom-rm-path") in REWARDS
    return draft.has("--use-opd") and (kind == "sglang" or is_unknown)


def has_zero_reward(draft: TranslationDraft) -> bool:
    """Whether slime's own functions ask the teacher and give 0 to every sample."""
    return is_served(draft) and _value(draft, "--custom-rm-path") in REWARDS


def _opd(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if not draft.has("--use-opd"):
        draft.report(argument, Kind.dropped, "has no effect without --use-opd")
    elif argument.name == "--opd-type":
        draft.report(argument, Kind.dropped, _SERVER if is_served(draft) else row.note)
    elif row.key == "model.teacher_load" and is_served(draft):
        draft.report(argument, Kind.wrong, "slime refuses it with --opd-type sglang", key=row.key)
    elif row.key:
        draft.rename(argument, replace(row, note=""))
    elif draft.has("--opd-kl-coef"):
        draft.report(argument, Kind.dropped, row.note)
    else:
        draft.set(argument, "algo.opd_kl_coef", Setting(value=1.0))


def _estimator(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if argument.value != ESTIMATOR:
        draft.rename(argument, row)
        return
    note = "the advantage is the logprob of the teacher minus that of the policy; rewards of 0 add nothing to it"
    draft.set(argument, "algo.opd_kl_coef", Setting(value=1.0), note=note)


def _reward(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if has_zero_reward(draft):
        draft.set(argument, "reward.type", Setting(value="zero"), note="slime's function gives 0 to every sample")
    else:
        draft.rename(argument, row)
        if is_served(draft):
            text = "the run asks model.teacher_url for the teacher's logprobs; your function returns the reward alone"
            draft.note(Kind.changed, argument.value, text)


def _post_process(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    is_own = argument.value.replace(":", ".") not in POST_PROCESSES
    if not is_served(draft) or is_own:
        draft.rename(argument, row)
        if is_served(draft):
            text = "sample.teacher_log_probs has no effect; the run asks model.teacher_url for the teacher's logprobs"
            draft.note(Kind.changed, argument.value, text)
    else:
        draft.report(argument, Kind.dropped, _SERVER)


def _server(draft: TranslationDraft, argument: Argument, row: TableRow) -> None:
    if not is_served(draft):
        draft.rename(argument, row)
        return
    url = _without_endpoint(argument.values[0]) if argument.values else ()
    note = "the run asks this server and does not start it; start it first"
    key = "model.teacher_url"
    if not value_of(url) or not argument.is_known:
        draft.rename(argument, TableRow(argument=row.argument, key=key, conversion="", note=note))
        return
    setting = Setting.from_text(url)
    if template_of(url).rstrip("}'").endswith(ENDPOINT):
        # The endpoint is in the default of a variable, whose other values have it too.
        setting, note = Setting(value=value_of(url)), f"{template_of(url)} has the endpoint {ENDPOINT}, the key has not"
    draft.set(argument, key, setting, note=note)


def _without_endpoint(url: Text) -> Text:
    """A URL without `/generate` at its end, which may be in the default of a variable."""
    *before, last = url
    value, template = (text.rstrip("/").removesuffix(ENDPOINT) for text in (last.value, last.template))
    return (*before, replace(last, value=value, template=template))


DISTILLATION: Mapping[str, Conversion] = MappingProxyType(
    {"opd": _opd, "estimator": _estimator, "custom_rm": _reward, "post_process": _post_process, "rm_url": _server}
)
"""Conversion of the table -> the function that places an argument."""
