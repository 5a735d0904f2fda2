"""Protobuf <-> plain data shared by both services: layouts, endpoints, failures.

``*_from_pb`` raise typed errors that name the field when a peer sends something this release
doesn't know.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import TypeVar

from sluice.errors import BadRequest, LayoutRefused, SluiceError
from sluice.layout.component import Component, Coverage, Entry, Kind, Owner, Space
from sluice.layout.layout import Geometry, Layout, ModelIdentity, Parallelism, SpecIdentity
from sluice.layout.outcome import Mismatch, Severity
from sluice.pools.base import Region
from sluice.transfer.plane import Endpoint
from sluice.v1 import layout_pb2

E = TypeVar("E", bound=Enum)


def layout_to_pb(layout: Layout) -> layout_pb2.Layout:
    model, geometry, spec = layout.model, layout.geometry, layout.spec
    return layout_pb2.Layout(
        role=layout.role,
        model=layout_pb2.ModelIdentity(
            architecture=model.architecture,
            config_digest=model.config_digest,
            weights_digest=model.weights_digest,
            tokenizer_digest=model.tokenizer_digest,
        ),
        geometry=layout_pb2.Geometry(
            page_tokens=geometry.page_tokens,
            window_tokens=geometry.window_tokens,
            compression_ratios=geometry.compression_ratios,
            pool_mode=geometry.pool_mode,
            ring_rows=geometry.ring_rows,
            kv_dtype=geometry.kv_dtype,
            byte_layout=geometry.byte_layout,
        ),
        parallelism=layout_pb2.Parallelism(
            tensor=layout.parallelism.tensor,
            context=layout.parallelism.context,
            rank=layout.parallelism.rank,
        ),
        spec=layout_pb2.SpecIdentity(
            algorithm=spec.algorithm,
            steps=spec.steps,
            draft_tokens=spec.draft_tokens,
            draft_digest=spec.draft_digest,
            draft_ratios=spec.draft_ratios,
        ),
        components=[component_to_pb(component) for component in layout.components],
        wire_version=layout.wire_version,
    )


def layout_from_pb(layout: layout_pb2.Layout) -> Layout:
    """Raises ``LayoutRefused`` for a kind, space, coverage or owner this release doesn't know."""
    model, geometry, spec = layout.model, layout.geometry, layout.spec
    return Layout(
        role=layout.role,
        model=ModelIdentity(
            architecture=model.architecture,
            config_digest=model.config_digest,
            weights_digest=model.weights_digest,
            tokenizer_digest=model.tokenizer_digest,
        ),
        geometry=Geometry(
            page_tokens=geometry.page_tokens,
            window_tokens=geometry.window_tokens,
            compression_ratios=tuple(geometry.compression_ratios),
            pool_mode=geometry.pool_mode,
            ring_rows=geometry.ring_rows,
            kv_dtype=geometry.kv_dtype,
            byte_layout=geometry.byte_layout,
        ),
        parallelism=Parallelism(
            tensor=layout.parallelism.tensor,
            context=layout.parallelism.context,
            rank=layout.parallelism.rank,
        ),
        spec=SpecIdentity(
            algorithm=spec.algorithm,
            steps=spec.steps,
            draft_tokens=spec.draft_tokens,
            draft_digest=spec.draft_digest,
            draft_ratios=tuple(spec.draft_ratios),
        ),
        components=tuple(component_from_pb(component) for component in layout.components),
        wire_version=layout.wire_version,
    )


def component_to_pb(component: Component) -> layout_pb2.Component:
    return layout_pb2.Component(
        name=component.name,
        owner=component.owner.value,
        kind=component.kind.value,
        space=component.space.value,
        coverage=component.coverage.value,
        tokens_per_row=component.tokens_per_row,
        rows_per_item=component.rows_per_item,
        window_tokens=component.window_tokens,
        num_items=component.num_items,
        entries=[_entry_to_pb(entry) for entry in component.entries],
        interleave=component.interleave,
    )


def component_from_pb(component: layout_pb2.Component) -> Component:
    name = component.name
    return Component(
        name=name,
        owner=_known(Owner, component.owner, f"components[{name}].owner"),
        kind=_known(Kind, component.kind, f"components[{name}].kind"),
        space=_known(Space, component.space, f"components[{name}].space"),
        coverage=_known(Coverage, component.coverage, f"components[{name}].coverage"),
        tokens_per_row=component.tokens_per_row,
        rows_per_item=component.rows_per_item,
        window_tokens=component.window_tokens,
        num_items=component.num_items,
        entries=tuple(_entry_from_pb(entry) for entry in component.entries),
        interleave=component.interleave,
    )


def _entry_to_pb(entry: Entry) -> layout_pb2.Entry:
    return layout_pb2.Entry(
        layer_id=entry.layer_id,
        dtype=entry.dtype,
        row_shape=entry.row_shape,
        row_bytes=entry.row_bytes,
        shard_axis=entry.shard_axis,
        shards=entry.shards,
    )


def _entry_from_pb(entry: layout_pb2.Entry) -> Entry:
    return Entry(
        layer_id=entry.layer_id,
        dtype=entry.dtype,
        row_shape=tuple(entry.row_shape),
        row_bytes=entry.row_bytes,
        shard_axis=entry.shard_axis if entry.HasField("shard_axis") else None,
        shards=entry.shards,
    )


def _known(kind: type[E], value: str, path: str) -> E:
    try:
        return kind(value)
    except ValueError:
        raise LayoutRefused(
            f"{path} is {value!r}, this release knows {', '.join(str(m.value) for m in kind)}",
            stage="handshake",
            remedy="run the same Sluice release on both pods",
        ) from None


def mismatch_to_pb(mismatch: Mismatch) -> layout_pb2.Mismatch:
    return layout_pb2.Mismatch(
        path=mismatch.path,
        prefill_value=mismatch.prefill_value,
        decode_value=mismatch.decode_value,
        severity=mismatch.severity.value,
        explanation=mismatch.explanation,
        remedy=mismatch.remedy,
    )


def mismatch_from_pb(mismatch: layout_pb2.Mismatch) -> Mismatch:
    return Mismatch(
        path=mismatch.path,
        prefill_value=mismatch.prefill_value,
        decode_value=mismatch.decode_value,
        severity=_known(Severity, mismatch.severity, f"severity of {mismatch.path}"),
        explanation=mismatch.explanation,
        remedy=mismatch.remedy,
    )


def endpoint_to_pb(endpoint: Endpoint) -> layout_pb2.Endpoint:
    return layout_pb2.Endpoint(
        plane=endpoint.plane,
        agent_name=endpoint.agent_name,
        metadata=endpoint.metadata,
        memory=endpoint.memory,
        device=endpoint.device,
        regions=[region_to_pb(region) for region in endpoint.regions],
    )


def endpoint_from_pb(endpoint: layout_pb2.Endpoint) -> Endpoint:
    return Endpoint(
        plane=endpoint.plane,
        agent_name=endpoint.agent_name,
        metadata=endpoint.metadata,
        memory=endpoint.memory,
        device=endpoint.device,
        regions=tuple(region_from_pb(region) for region in endpoint.regions),
    )


def region_to_pb(region: Region) -> layout_pb2.Region:
    return layout_pb2.Region(
        component=region.component,
        layer_id=region.layer_id,
        address=region.address,
        num_rows=region.num_rows,
        row_bytes=region.row_bytes,
    )


def region_from_pb(region: layout_pb2.Region) -> Region:
    return Region(
        component=region.component,
        layer_id=region.layer_id,
        address=region.address,
        num_rows=region.num_rows,
        row_bytes=region.row_bytes,
    )


def failure_to_pb(error: SluiceError) -> layout_pb2.Failure:
    return layout_pb2.Failure(
        code=error.code,
        message=error.message,
        stage=error.stage,
        retryable=error.retryable,
        remedy=error.remedy,
        field=error.field if isinstance(error, BadRequest) else "",
    )


def failure_from_pb(failure: layout_pb2.Failure) -> SluiceError:
    """The error class that ``failure.code`` names, ``SluiceError`` itself for a code from another
    release.
    """
    kind = next((c for c in _error_classes(SluiceError) if c.__name__ == failure.code), None)
    message = failure.message if kind else f"{failure.code}: {failure.message}"
    error = (kind or SluiceError)(message, stage=failure.stage, remedy=failure.remedy)
    error.retryable = failure.retryable
    if isinstance(error, BadRequest):
        error.field = failure.field
    return error


def _error_classes(root: type[SluiceError]) -> Iterator[type[SluiceError]]:
    yield root
    for child in root.__subclasses__():
        yield from _error_classes(child)
