"""Folders to S3. A file whose size and SHA-256 are there already is not sent again; large ones go in parts."""

from pathlib import Path
from typing import Any

from peagle.deploy.sagemaker.operate.clients import absent
from peagle.deploy.sagemaker.plan.artifact import sha256
from peagle.deploy.sagemaker.resources.stack import Upload
from peagle.errors import UserError
from peagle.progress import Progress, silent


def upload(client: Any, upload: Upload, progress: Progress = silent) -> int:
    """How many files were sent. Stopped half-way, the next call goes on with the file it was at."""
    folder = upload.artifact.folder
    assert folder is not None, "fetched before it is uploaded"
    bucket, _, prefix = upload.uri.removeprefix("s3://").partition("/")
    require_bucket(client, bucket)
    sent = 0
    for path in upload.artifact.files():
        key = prefix + path.relative_to(folder).as_posix()
        digest = sha256(path, progress)
        if not there(client, bucket, key, path.stat().st_size, digest):
            send(client, path, bucket, key, digest, progress)
            sent += 1
    return sent


def require_bucket(client: Any, bucket: str) -> None:
    from botocore.exceptions import ClientError

    try:
        client.head_bucket(Bucket=bucket)
    except ClientError as error:
        if absent(error):
            raise UserError(
                f"there is no bucket {bucket}: `aws s3 mb s3://{bucket}`, or give --bucket"
            ) from error
        raise


def there(client: Any, bucket: str, key: str, size: int, digest: str) -> bool:
    from botocore.exceptions import ClientError

    try:
        head = client.head_object(Bucket=bucket, Key=key)
    except ClientError as error:
        if absent(error):
            return False
        raise
    return head["ContentLength"] == size and head["Metadata"].get("sha256") == digest


def send(client: Any, path: Path, bucket: str, key: str, digest: str, progress: Progress) -> None:
    """In parts and in parallel, each checked on arrival: boto3 does that. The whole file's digest goes with it."""
    from boto3.exceptions import S3UploadFailedError

    done, total = 0, path.stat().st_size

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(f"{path.name}: sending", done, total)

    try:
        client.upload_file(
            str(path), bucket, key, ExtraArgs={"Metadata": {"sha256": digest}}, Callback=advance
        )
    except S3UploadFailedError as error:
        raise UserError(f"{error}; what came through stays, run it again to go on") from error
