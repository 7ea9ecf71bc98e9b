"""One safetensors file a sample, renamed into place."""

from __future__ import annotations

import json
import os
import re

import attrs
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from draftsmith.errors import FingerprintMismatch, SampleCorrupt, SampleMissing, TransportError
from draftsmith.interfaces import HiddenStateReader, HiddenStateSample, HiddenStateTransport, HiddenStateWriter

_ID = re.compile(r"[0-9a-f]{32}")


class Files(HiddenStateTransport):
    def writer(self, layout):
        return FilesWriter(self._folder(layout), layout)

    def reader(self, layout):
        return FilesReader(self._folder(layout), layout)

    def remove_all(self, sample_ids=None):
        wanted = None if sample_ids is None else set(sample_ids)
        for path in self.location.glob("*.safetensors"):
            if wanted is None or path.stem in wanted:
                path.unlink()
        if wanted is None:
            for path in self.location.glob(".*.safetensors.*"):  # of writers that were killed
                path.unlink(missing_ok=True)
            (self.location / "layout.json").unlink(missing_ok=True)

    def _folder(self, layout):
        self.location.mkdir(parents=True, exist_ok=True)
        path, text = self.location / "layout.json", json.dumps(attrs.asdict(layout), sort_keys=True)
        if not path.exists():
            path.write_text(text)
        if json.loads(path.read_text()) != json.loads(text):
            raise FingerprintMismatch("states of another capture", where=str(path))
        return self.location


class FilesWriter(HiddenStateWriter):
    def __init__(self, folder, layout):
        self.folder, self.layout = folder, layout

    def put(self, sample):
        if not _ID.fullmatch(sample.sample_id):
            raise TransportError(f"{sample.sample_id!r} is no sample id")
        problem = sample.problem(self.layout)
        if problem is not None:
            raise SampleCorrupt(problem, sample_id=sample.sample_id)
        path = self.folder / f"{sample.sample_id}.safetensors"
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        tensors = {"token_ids": sample.token_ids, "hidden_states": sample.hidden_states}
        save_file({name: value.contiguous() for name, value in tensors.items()}, temporary)
        os.replace(temporary, path)


class FilesReader(HiddenStateReader):
    def __init__(self, folder, layout):
        self.folder, self.layout = folder, layout

    def get(self, sample_id, *, expected_tokens=None):
        path = self.folder / f"{sample_id}.safetensors"
        if not _ID.fullmatch(sample_id) or not path.exists():
            raise SampleMissing("no file", sample_id=sample_id, where=str(path))
        try:
            with safe_open(path, "pt") as file:
                tokens, states = file.get_tensor("token_ids"), file.get_tensor("hidden_states")
        except SafetensorError as error:
            raise SampleCorrupt(str(error), sample_id=sample_id, where=str(path)) from error
        if expected_tokens is not None and len(tokens) != expected_tokens:
            raise SampleCorrupt(f"{len(tokens)} tokens", sample_id=sample_id, where=str(path))
        sample = HiddenStateSample(sample_id=sample_id, token_ids=tokens, hidden_states=states)
        problem = sample.problem(self.layout)
        if problem is not None:
            raise SampleCorrupt(problem, sample_id=sample_id, where=str(path))
        return sample

    def complete_ids(self):
        return frozenset(path.stem for path in self.folder.glob("*.safetensors"))

    def delete(self, sample_id):
        if _ID.fullmatch(sample_id):
            (self.folder / f"{sample_id}.safetensors").unlink(missing_ok=True)
