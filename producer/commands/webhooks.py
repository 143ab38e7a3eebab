"""Commands about webhooks: secrets of tenants, and deliveries that failed permanently."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from promptq.producer.commands.options import AsJson, Queue, Redis
from promptq.producer.settings.jobs import JobsSettings
from promptq.shared.errors import InvalidRequestError
from promptq.shared.protocol.keys import NAME_IN_WORDS, Keys, is_name
from promptq.shared.runtime.extras import require
from promptq.shared.settings.common import read_settings_of

if TYPE_CHECKING:
    from promptq.producer.webhooks.webhook_signature import WebhookSecrets

webhooks = typer.Typer(
    name="webhooks",
    no_args_is_help=True,
    help="Secrets of webhooks, and webhooks that were given up.",
)

Tenant = Annotated[
    str | None,
    typer.Option(
        help="Tenant whose webhooks the secret signs; default: requests without a tenant."
    ),
]


@webhooks.command()
def secret(tenant: Tenant = None, as_json: AsJson = False, queue: Queue = None) -> None:
    """Print the secret with which a tenant's receivers verify signatures.

    If two secrets are valid, the newest comes first.

    Run this command as the same user and with the same settings as
    `promptq jobs`, because the command reads the folder for files.

    Examples:

    promptq webhooks secret --tenant web
    """
    secrets = _secrets(queue).of(_checked(tenant))
    print(json.dumps({"tenant": tenant, "secrets": secrets}) if as_json else "\n".join(secrets))


@webhooks.command()
def rotate(tenant: Tenant = None, as_json: AsJson = False, queue: Queue = None) -> None:
    """Create and print a tenant's next secret. For one day, the previous one signs, too.

    Give the new secret to the receivers within this day. A second rotation on the
    same day ends the oldest secret at once.

    Examples:

    promptq webhooks rotate --tenant web
    """
    created = _secrets(queue).rotate(_checked(tenant))
    print(json.dumps({"tenant": tenant, "secret": created}) if as_json else created)


@webhooks.command()
def dead(as_json: AsJson = False, redis: Redis = None, queue: Queue = None) -> None:
    """List webhooks that failed permanently, the latest first.

    Examples:

    promptq webhooks dead
    """
    require("promptq webhooks", "jobs")
    from promptq.producer.clients.connecting import explained, server_url
    from promptq.producer.commands.screens.render import dead_webhooks_table
    from promptq.producer.commands.screens.terminal import console_for_list
    from promptq.producer.webhooks.deliveries import read_dead
    from promptq.shared.server.connection import open_redis

    settings = read_settings_of(JobsSettings, redis_url=redis, queue=queue)
    url = server_url(settings.redis_url)
    with explained(url), open_redis(url) as connection:
        letters = read_dead(connection, Keys(settings.queue))
    if as_json:
        print(json.dumps([item.model_dump() for item in letters], indent=2))
        return
    if letters:
        console_for_list().print(dead_webhooks_table(letters))
    else:
        print("no webhooks were given up")


def _secrets(queue: str | None) -> WebhookSecrets:
    require("promptq webhooks", "jobs")
    from promptq.producer.webhooks.webhook_signature import WebhookSecrets

    return WebhookSecrets(read_settings_of(JobsSettings, queue=queue))


def _checked(tenant: str | None) -> str:
    if tenant is not None and not is_name(tenant):
        raise InvalidRequestError(f"tenant: {tenant[:80]!r} is not {NAME_IN_WORDS}", field="tenant")
    return tenant or ""
