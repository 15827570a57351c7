"""Upload of folders to S3. Files that are there with the same size and SHA-256 are skipped.

Names of buckets are global and can be guessed: every call names the account that must own the
bucket, so that nothing is read from or written to a bucket that somebody else created first.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.deploy.sagemaker.operate.clients import is_denied, is_not_found
from peagle.deploy.sagemaker.plan.artifact import hash_file
from peagle.deploy.sagemaker.resources.stack import Upload
from peagle.errors import UserError
from peagle.progress import Progress, silent


@dataclass(frozen=True, slots=True)
class OwnedBucket:
    name: str
    owner: str  # id of an account

    @property
    def parameters(self) -> dict[str, str]:
        """The parameters of S3's calls; S3 refuses them for a bucket of another account."""
        return {"Bucket": self.name, "ExpectedBucketOwner": self.owner}


def upload_files(client: Any, upload: Upload, owner: str, progress: Progress = silent) -> int:
    """Upload the missing files to a bucket of the account `owner`, and return their number.

    After an interruption, the next call continues with the file that was interrupted.
    """
    folder = upload.artifact.folder
    assert folder is not None, "an artifact is fetched before it is uploaded"
    name, _, prefix = upload.uri.removeprefix("s3://").partition("/")
    bucket = OwnedBucket(name, owner)
    require_bucket(client, bucket)
    count = 0
    for path in upload.artifact.files():
        key = prefix + path.relative_to(folder).as_posix()
        digest = hash_file(path, progress)
        if not is_uploaded(client, bucket, key, path.stat().st_size, digest):
            upload_file(client, path, bucket, key, digest, progress)
            count += 1
    return count


def require_bucket(client: Any, bucket: OwnedBucket) -> None:
    from botocore.exceptions import ClientError

    try:
        client.head_bucket(**bucket.parameters)
    except ClientError as error:
        if is_not_found(error):
            raise UserError(
                f"there is no bucket {bucket.name}: run `aws s3 mb s3://{bucket.name}`, or give"
                " `bucket`"
            ) from error
        if is_denied(error):
            raise UserError(
                f"the bucket {bucket.name} does not belong to account {bucket.owner}, or you may"
                " not read it: check `bucket`, or give the account with `bucket_owner`"
            ) from error
        raise


def is_uploaded(client: Any, bucket: OwnedBucket, key: str, size: int, digest: str) -> bool:
    from botocore.exceptions import ClientError

    try:
        head = client.head_object(**bucket.parameters, Key=key)
    except ClientError as error:
        if is_not_found(error):
            return False
        raise
    return head["ContentLength"] == size and head["Metadata"].get("sha256") == digest


def upload_file(
    client: Any, path: Path, bucket: OwnedBucket, key: str, digest: str, progress: Progress
) -> None:
    """Upload one file with its digest as metadata.

    boto3 sends large files in parallel parts, and each part is verified on arrival.
    """
    from boto3.exceptions import S3UploadFailedError

    done = 0
    total = path.stat().st_size

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(f"{path.name}: sending", done, total)

    extra = {"Metadata": {"sha256": digest}, "ExpectedBucketOwner": bucket.owner}
    try:
        client.upload_file(str(path), bucket.name, key, ExtraArgs=extra, Callback=advance)
    except S3UploadFailedError as error:
        raise UserError(
            f"{error}; the uploaded files stay: run the command again to continue"
        ) from error
