"""Everything kvcellar raises, as one tree.

KVCellarError
├── InvalidInput (ValueError)        an argument does not fit: token ids, ranges, an empty cache
│   ├── TokensMismatch               token ids that contradict the cache or the archive
│   └── InvalidRecipe                a recipe that cannot be read or built
├── UnsupportedCache                 a layer this version cannot store; the message names it
├── IdentityError
│   ├── MissingIdentity              neither a model nor an identity was given
│   ├── IdentityMismatch             the archive belongs to another model
│   └── RuntimeMismatch              ids coded under a model that another runtime computed
├── ProfileError
│   ├── ProfileMissing               the profile an archive names cannot be found
│   └── ProfileMismatch              a profile that is not the one the archive names, or is damaged
├── ArchiveError
│   ├── ArchiveNotFound (FileNotFoundError)   nothing there, or nothing in this namespace
│   ├── NotAnArchive                 the file starts like something else
│   ├── DamagedArchive               truncated or altered; ``part`` names where
│   ├── NewerFormat                  written by a later kvcellar
│   ├── OlderFormat                  a format version that was never released
│   ├── ArchiveLocked                another writer holds the file
│   └── ArchiveClosed                used after ``close``
├── StorageError (OSError)           the file system refused; nothing was deleted
├── ModelMissing                     the recipe computes part of the cache anew, and there is no model
└── MissingExtra (ImportError)       an optional dependency is not installed

``exit_code`` is what the command line returns for each (listed in docs/cli.md).
"""

from __future__ import annotations


class KVCellarError(Exception):
    """Root of every error kvcellar raises on purpose."""

    exit_code = 1


class InvalidInput(KVCellarError, ValueError):
    exit_code = 2


class TokensMismatch(InvalidInput):
    exit_code = 6


class InvalidRecipe(InvalidInput):
    pass


class UnsupportedCache(KVCellarError):
    exit_code = 7


class IdentityError(KVCellarError):
    exit_code = 6


class MissingIdentity(IdentityError):
    pass


class IdentityMismatch(IdentityError):
    pass


class RuntimeMismatch(IdentityError):
    pass


class ProfileError(KVCellarError):
    exit_code = 6


class ProfileMissing(ProfileError):
    pass


class ProfileMismatch(ProfileError):
    pass


class ArchiveError(KVCellarError):
    pass


class _PlainMessage(OSError):
    """An OSError whose text is its message, without the number in front."""

    def __str__(self) -> str:
        return self.strerror or super().__str__()


class ArchiveNotFound(ArchiveError, _PlainMessage, FileNotFoundError):
    exit_code = 3


class NotAnArchive(ArchiveError):
    exit_code = 4


class DamagedArchive(ArchiveError):
    """A part of the file is truncated or altered; ``part`` names it."""

    exit_code = 4

    def __init__(self, part: str, problem: str):
        super().__init__(f"damaged archive: {part}: {problem}")
        self.part = part
        self.problem = problem


class NewerFormat(ArchiveError):
    exit_code = 5


class OlderFormat(ArchiveError):
    exit_code = 10


class ArchiveLocked(ArchiveError):
    exit_code = 9


class ArchiveClosed(ArchiveError):
    pass


class StorageError(KVCellarError, _PlainMessage):
    exit_code = 8


class ModelMissing(KVCellarError):
    exit_code = 6


class MissingExtra(KVCellarError, ImportError):
    exit_code = 11
