"""Prompts of four domains that the shipped drafters were not trained on, written from templates.

German and Spanish chat, SQL, and JSON extraction. A prompt depends on its domain and number alone,
so every run has the same ones; no two of a domain are equal.
"""

import random

NAMES = [
    "Anna Becker",
    "Luis Ortega",
    "Mei Tanaka",
    "Omar Haddad",
    "Ingrid Larsen",
    "Paul Novak",
    "Sofia Rossi",
]
CITIES = [
    "Lisbon",
    "Leipzig",
    "Lyon",
    "Malmo",
    "Krakow",
    "Porto",
    "Ghent",
    "Trieste",
    "Graz",
    "Bilbao",
    "Cork",
    "Tartu",
]
GOODS = [
    "desk lamp",
    "office chair",
    "router",
    "water filter",
    "drill",
    "tent",
    "kettle",
    "backpack",
    "monitor",
]
TABLES = {
    "orders": ("id", "customer_id", "total", "created_at", "status"),
    "employees": ("id", "name", "department", "salary", "hired_on"),
    "flights": ("id", "origin", "destination", "departs_at", "price"),
    "books": ("id", "title", "author", "year", "copies"),
    "patients": ("id", "name", "birth_date", "ward", "doctor_id"),
    "tickets": ("id", "subject", "priority", "opened_at", "closed_at"),
}
SQL_TASKS = (
    "Write a SQL query that lists the {n} rows with the highest {a}.",
    "Write a SQL query that counts the rows for each {b}, and sorts the counts.",
    "Write a SQL query for all rows whose {a} is above the average of its {b}.",
    "Write a SQL query that returns the {a} of every row where {b} is not null and id > {n}.",
    "Write a SQL statement that sets {a} to NULL where {b} is older than {n} days.",
    "Write a CREATE TABLE statement for it, with an index on {a} and {b}.",
    "Write a SQL query that joins it with a table `notes` on id and returns {a} and {b}.",
)
GERMAN_TOPICS = [
    "das Wetter im Herbst",
    "gesundes Frühstück",
    "eine Reise nach {c}",
    "den Garten im Winter",
    "guten Schlaf",
    "das Lernen von Sprachen",
    "eine Bewerbung",
    "das Kochen von Nudeln",
    "den Umzug nach {c}",
    "Fahrräder",
    "alte Bücher",
    "Sport am Abend",
    "einen Besuch im Museum von {c}",
    "die Pflege von Pflanzen",
]
GERMAN_TASKS = (
    "Schreibe einen kurzen Absatz über {t}.",
    "Gib mir {n} Tipps für {t}.",
    "Erkläre einem Kind, was man über {t} wissen sollte.",
    "Schreibe eine freundliche E-Mail an {p} über {t}.",
    "Was sind die Vor- und Nachteile, wenn man an {t} denkt? Antworte in {n} Sätzen.",
    "Schreibe ein Gespräch zwischen {p} und einem Freund über {t}.",
)
SPANISH_TOPICS = [
    "el clima en otoño",
    "un desayuno sano",
    "un viaje a {c}",
    "el jardín en invierno",
    "dormir bien",
    "aprender idiomas",
    "una entrevista de trabajo",
    "cocinar arroz",
    "mudarse a {c}",
    "las bicicletas",
    "los libros antiguos",
    "el deporte por la tarde",
    "visitar el museo de {c}",
    "cuidar las plantas",
]
SPANISH_TASKS = (
    "Escribe un párrafo corto sobre {t}.",
    "Dame {n} consejos sobre {t}.",
    "Explica a un niño lo que hay que saber sobre {t}.",
    "Escribe un correo amable a {p} sobre {t}.",
    "¿Cuáles son las ventajas y desventajas de {t}? Responde en {n} frases.",
    "Escribe una conversación entre {p} y un amigo sobre {t}.",
)
JSON_TEXTS = (
    "{p} from {c} ordered {n} x {g} on {y}-{m:02d}-{d:02d} for {x}.50 euros, to be sent by post.",
    "Meeting: {p} and {q} in {c}, {y}-{m:02d}-{d:02d} at {h}:30, about the new {g}.",
    "Invoice {i}: {g}, quantity {n}, unit price {x}.00 EUR, customer {p}, city {c}, due {d}/{m}.",
    "Please call {p} back at +49 30 {i}; the {g} that arrived in {c} on {d}/{m} is broken.",
    "{p}, {a} years old, moved from {c} to {k} in {y} and works there for a {g} shop.",
)
DOMAINS = ("german", "spanish", "sql", "json")


def domain_prompts(domain: str, count: int) -> list[str]:
    prompts: dict[str, None] = {}
    for number in range(100 * count):
        prompts[_prompt(domain, random.Random(f"{domain} {number}"))] = None
        if len(prompts) == count:
            return list(prompts)
    raise ValueError(f"the templates of {domain} give only {len(prompts)} prompts")


def _prompt(domain: str, rng: random.Random) -> str:
    if domain == "sql":
        return _sql_prompt(rng)
    if domain == "json":
        return _json_prompt(rng)
    german = domain == "german"
    topic = rng.choice(GERMAN_TOPICS if german else SPANISH_TOPICS).format(c=rng.choice(CITIES))
    task = rng.choice(GERMAN_TASKS if german else SPANISH_TASKS)
    return task.format(t=topic, n=rng.randint(3, 9), p=rng.choice(NAMES))


def _sql_prompt(rng: random.Random) -> str:
    table = rng.choice(list(TABLES))
    columns = list(TABLES[table])
    a, b = rng.sample(columns[1:], 2)
    task = rng.choice(SQL_TASKS).format(a=a, b=b, n=rng.randint(2, 60))
    return f"The table `{table}` has the columns {', '.join(columns)}. {task}"


def _json_prompt(rng: random.Random) -> str:
    text = rng.choice(JSON_TEXTS).format(
        p=rng.choice(NAMES),
        q=rng.choice(NAMES),
        c=rng.choice(CITIES),
        k=rng.choice(CITIES),
        g=rng.choice(GOODS),
        n=rng.randint(1, 20),
        x=rng.randint(5, 400),
        i=rng.randint(10_000, 99_999),
        y=rng.randint(2019, 2026),
        m=rng.randint(1, 12),
        d=rng.randint(1, 28),
        h=rng.randint(8, 19),
        a=rng.randint(19, 80),
    )
    return f"Extract every name, place, date and number of this text as one JSON object.\n\n{text}"
