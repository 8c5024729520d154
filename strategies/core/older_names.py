"""Names that older scripts use, from before TensorFlow's strategies left `experimental`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strategies.core.run_options import RunOptions
    from strategies.input import InputContext, InputOptions


class OlderNames:
    """Methods of every strategy under their older names."""

    if TYPE_CHECKING:
        run: Callable[..., Any]
        distribute_datasets_from_function: Callable[..., Iterable[Any]]

    def experimental_run_v2(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """As `run`."""
        return self.run(fn, args, kwargs, options)

    def experimental_distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Iterable[Any]],
        options: InputOptions | None = None,
    ) -> Iterable[Any]:
        """As `distribute_datasets_from_function`."""
        return self.distribute_datasets_from_function(dataset_fn, options)
