"""Keys and certificates of an authority of the tests' own, made by openssl, and a broker that asks for them."""

import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

from broker import HOST, RunningBroker, program, running_broker

PERIODS = {"valid": ("20200101000000Z", "20991231000000Z"), "expired": ("20200101000000Z", "20200102000000Z")}
CA = """
[ca]
default_ca = own
[own]
database = {folder}/index
new_certs_dir = {folder}
rand_serial = yes
default_md = sha256
policy = names
copy_extensions = copy
unique_subject = no
[names]
commonName = supplied
"""

SETTINGS = """
allow_anonymous false
password_file {folder}/passwords
cafile {ca.certificate}
certfile {files[0]}
keyfile {files[1]}
require_certificate true
"""


class Authority:
    """An authority whose certificate is `certificate`; it keeps everything in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        (folder / "index").touch()
        (folder / "ca.cnf").write_text(CA.format(folder=folder))
        self.certificate, self._key = folder / "ca.pem", folder / "ca.key"
        self._openssl("req", "-x509", *_key(self._key), "-days", "2", "-subj", "/CN=ca", "-out", self.certificate)

    def issue(self, name: str, host: str = HOST, period: str = "valid") -> tuple[Path, Path]:
        """Return the files of a certificate for `host`, an address, and of its key."""
        certificate, key, request = (self._folder / f"{name}.{suffix}" for suffix in ("pem", "key", "csr"))
        names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{host}"]
        self._openssl("req", *_key(key), *names, "-out", request)
        start, end = PERIODS[period]
        given = ["-config", self._folder / "ca.cnf", "-cert", self.certificate, "-keyfile", self._key, "-notext"]
        given += ["-batch", "-startdate", start, "-enddate", end, "-in", request, "-out", certificate]
        self._openssl("ca", *given)
        return certificate, key

    @staticmethod
    def _openssl(*arguments: str | Path) -> None:
        subprocess.run([program("openssl"), *arguments], check=True, capture_output=True)


def _key(path: Path) -> list[str | Path]:
    return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path]


def serving(
    folder: Path, authority: Authority, files: tuple[Path, Path], port: int | None = None
) -> AbstractContextManager[RunningBroker]:
    """Start a broker with these files that asks for a certificate of this authority and for the user me's password."""
    command = [program("mosquitto_passwd"), "-b", "-c", str(folder / "passwords"), "me", "right"]
    subprocess.run(command, check=True)
    return running_broker(folder, SETTINGS.format(folder=folder, ca=authority, files=files), port)
