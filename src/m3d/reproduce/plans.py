"""Every plan by its name and by the paper's own number."""

from __future__ import annotations

from m3d.errors import M3DError, unknown
from m3d.reproduce.beyond_plan import beyond
from m3d.reproduce.cells import Plan
from m3d.reproduce.figure_plans import images, ipm, kernel, motivation, steps
from m3d.reproduce.method_plans import methods
from m3d.reproduce.table_plans import compat, cross_arch, imagenet, lowres, moments

# In the order in which they are worth running.
_ALL = (lowres, methods, beyond, moments, kernel, ipm, steps, images, cross_arch, compat, motivation, imagenet)
PLANS: dict[str, Plan] = {plan.name: plan for plan in (make() for make in _ALL)}
# The paper's own numbers: the plan, and which of its cells where it is not all of them.
ALIASES: dict[str, tuple[tuple[str, str | None], ...]] = {
    **{alias: ((plan.name, None),) for plan in PLANS.values() for alias in plan.aliases},
    "fig4": (("images", "svhn"),),
    "fig5": (("images", "imagenet10/*/m3d-factor3"),),
    "fig6": (("ipm", None), ("kernel", None)),
    "fig7": (("images", "cifar10"),),
    "fig8": (("images", "cifar100"),),
    "fig9": (("images", "svhn"),),
    "fig10": (("images", "fashion-mnist"),),
    "fig11": (("images", "imagenet10"),),
    "all": tuple((name, None) for name in PLANS),
}


def find(name: str) -> list[tuple[Plan, str | None]]:
    """The plans that ``name`` or the paper's number stands for, each with the cells it is confined to."""
    wanted = name.strip().lower().replace("_", "-")
    if wanted == "fig2":
        raise M3DError("fig2 is the drawing of the framework: there is nothing to run; see docs/method.md")
    if wanted in PLANS:
        return [(PLANS[wanted], None)]
    if wanted not in ALIASES:
        raise unknown("table or figure", name, {*PLANS, *ALIASES})
    return [(PLANS[plan], pattern) for plan, pattern in ALIASES[wanted]]
