"""A handle of one artifact version, or of a view of it.

Rules:

1. A handle names one generation for ever. It holds no bytes and no pin: a read gives the
   values of that generation, or Gone at once when it was destroyed.
2. What moves bytes is a verb; what does not is a property.
3. Handles are small, picklable and hash by what they name. One that was unpickled belongs
   to the session of the place where it is used: a task's worker, else the newest session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorcast_dask.exceptions import Mismatch, TensorCastError
from tensorcast_dask.notebook.cards import artifact_card
from tensorcast_dask.tensors.messages import Owner

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tensorcast_dask.tensors.messages import ArtifactInfo
    from tensorcast_dask.tensors.specs import TensorSpec

__all__ = ["Artifact", "spec_dict"]


class Artifact:
    """Named tensors that live in the cluster.

    Attributes
    ----------
    info : ArtifactInfo
        What the catalog said when the handle was made.
    """

    __slots__ = ("__weakref__", "_registration", "_session", "info")

    def __init__(self, info: ArtifactInfo, session: Any = None) -> None:
        self.info = info
        self._session = session
        #: The caller's side of a registered artifact, in the process that registered it.
        self._registration: Any = None

    # ------------------------------------------------------------ what it is
    @property
    def id(self) -> str:
        """The name."""
        return self.info.id

    @property
    def version(self) -> int:
        """The version, from 1."""
        return self.info.version

    @property
    def generation(self) -> int:
        """Identity of this version's one life."""
        return self.info.generation

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors as they are stored, tied ones once."""
        return self.info.nbytes

    @property
    def labels(self) -> dict[str, str]:
        """Labels given at creation."""
        return dict(self.info.labels)

    @property
    def owner(self) -> Owner:
        """`system` (put) or `caller` (register)."""
        return self.info.owner

    @property
    def tier(self) -> str:
        """Tier to which the put that gave this handle brought the bytes; "" for other handles."""
        return self.info.tier or ""

    @property
    def degraded(self) -> str:
        """Why there are fewer replicas than asked for; "" when there are not."""
        return self.info.degraded

    @property
    def session(self) -> Any:
        """The session that carries its calls out."""
        if self._session is None or self._session.closed:
            from tensorcast_dask.api.current import current_session

            self._session = current_session(instead_of=self._session)
        return self._session

    # ------------------------------------------------------------ reading
    def tensor_meta(
        self, name: str | None = None, *, deadline: float | None = None
    ) -> Any:
        """Name, dtype and shape of every tensor, without their bytes.

        Parameters
        ----------
        name : str, optional
            Only that tensor's.
        deadline : float, optional
            Seconds.

        Returns
        -------
        dict of str to TensorSpec, or TensorSpec

        Raises
        ------
        NotFound
            When there is no tensor of that name.
        """
        return self.session.tensor_meta(self, name, deadline=deadline)

    def tensor_dict(
        self,
        *,
        framework: str | None = None,
        names: Iterable[str] | None = None,
        device: str | None = None,
        share: bool = False,
        deadline: float | None = None,
    ) -> Any:
        """Give the tensors, as private copy-on-write maps where a node of this host holds them.

        Parameters
        ----------
        framework : {"numpy", "torch", "cupy", "raw"}, optional
            What to make; default torch where it can be imported, else numpy, on a device cupy. On
            an emulated device only "raw", which is the default there.
        names : iterable of str, optional
            Only these.
        device : str, optional
            A device of this process (`cuda:0`, `emulated:0`, a UUID), or `device` for that of a
            node of this host: the result lies there. Else it lies in host memory.
        share : bool
            On a device: hand out the node's own memory, which must not be written to, instead
            of a private copy on the device. The artifact is brought there if it is not.
        deadline : float, optional
            Seconds; None the session's default, 0 only if no bytes must move first.

        Returns
        -------
        dict of str to array

        Raises
        ------
        Gone, DataLost, OwnerGone, NotFound, UnsupportedDtype, DeadlineExceeded
        UnsupportedPlatform, DeviceError, CapacityError
            When there is no such device here, it has failed, or it has no room.
        """
        return self.session.read(
            self,
            framework=framework,
            names=names,
            device=device,
            share=share,
            deadline=deadline,
        )

    def tensor(
        self,
        *,
        framework: str | None = None,
        device: str | None = None,
        share: bool = False,
        deadline: float | None = None,
    ) -> Any:
        """Give the tensor of an artifact that has one; arguments as of `tensor_dict`.

        Raises
        ------
        Mismatch
            When it has another number of tensors.
        """
        return self.session.read_one(
            self, framework=framework, device=device, share=share, deadline=deadline
        )

    def tensor_dict_into(
        self, targets: Mapping[str, Any], *, deadline: float | None = None
    ) -> Any:
        """Copy into arrays that the caller has; everything is checked before the first byte.

        Parameters
        ----------
        targets : mapping of str to array
            Writable, of equal dtype and shape; a part of the names is enough.

        Raises
        ------
        Mismatch
            Listing every target that does not fit; none was changed.
        """
        return self.session.read_into(self, targets, deadline=deadline)

    # ------------------------------------------------------------ deriving
    def view(
        self, what: Any, name: str | None = None, *, deadline: float | None = None
    ) -> Any:
        """Describe a derived artifact; no byte moves.

        Parameters
        ----------
        what : slice, tuple, or mapping of tensor name to slice
            A slice or tuple of them applies to the only tensor, or to the tensor called
            `name`; a mapping selects tensors and slices each (`tc.s_[...]`, or
            `slice(None)` for all of it). A `tensorcast_dask.tensors.views.View` is taken as it is.
        name : str, optional
            With a mapping: an id under which `artifact(name)` finds the view.
        deadline : float, optional
            Seconds.

        Returns
        -------
        Artifact
        """
        return self.session.view(self, what, name, deadline=deadline)

    # ------------------------------------------------------------ lifecycle, for short
    def publish(self, version: int | None = None, **options: Any) -> Any:
        """See `Session.publish`."""
        return self.session.publish(self, version, **options)

    def replicate(self, worker: Any, **options: Any) -> Any:
        """See `Session.replicate`."""
        return self.session.replicate(self, worker, **options)

    def destroy(self, **options: Any) -> Any:
        """See `Session.destroy`; ends this version only."""
        return self.session.destroy(self, **options)

    def release(self, **options: Any) -> Any:
        """See `Session.release`."""
        return self.session.release(self, **options)

    def save(self, path: str, **options: Any) -> Any:
        """See `Session.save`."""
        return self.session.save(self, path, **options)

    def locations(self, *, deadline: float | None = None) -> Any:
        """Where its replicas are: a list of `Location`."""
        return self.session.locations(self, deadline=deadline)

    def mutate(self) -> Any:
        """Fence for changing registered tensors: `with artifact.mutate(): ...`.

        Readers inside the fence wait or get Incomplete; copies that overlap it are thrown
        away and made again.

        Raises
        ------
        Mismatch
            When this process did not register the artifact.
        """
        if self._registration is None:
            message = f"{self.id!r} was not registered by this process; only its owner mutates it"
            raise Mismatch(message)
        return self._registration.mutate()

    # ------------------------------------------------------------ as a value
    def __reduce__(self) -> tuple[type[Artifact], tuple[ArtifactInfo]]:
        return Artifact, (self.info,)

    def _key(self) -> tuple[int, bytes, str]:
        return self.info.generation, self.info.view, self.info.index_digest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Artifact) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __dask_tokenize__(self) -> tuple[str, int, bytes, str]:
        return ("tensorcast-artifact", *self._key())

    def __sizeof__(self) -> int:
        return 256

    def __repr__(self) -> str:
        info = self.info
        text = f"<Artifact {info.id!r} v{info.version} {info.tensors} tensors, {info.nbytes:,} bytes"
        if info.owner is Owner.CALLER:
            text += ", caller-leased"
        if info.degraded:
            text += ", degraded"
        return text + (f", view of {info.base!r}>" if info.view else ">")

    def _repr_html_(self) -> str:
        try:
            places, specs = self.session._glimpse(self.info)  # noqa: SLF001 - one floor
        except TensorCastError:  # no session is open here
            places, specs = (), ()
        return artifact_card(self.info, places=places, specs=specs)


def spec_dict(specs: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
    """Specs by name, in their order."""
    return {spec.name: spec for spec in specs}
