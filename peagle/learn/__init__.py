"""Learning from traffic: a server's answers become documents, a trainer turns them into versions
of the drafter, and the server swaps in those that win. A folder is the interface between them:

    store.json                      StoreIdentity: whose answers these are (folder.py)
    documents/ENGINE-00000001.jsonl StoredDocument, one per line (store.py, store_reader.py)
    load/ENGINE.bin                 EngineLoad: whether requests run (engine_load.py)
    versions/0001/                  a drafter and its record
    current.json                    the version that serves
    learner.lock, versions.lock     one process at a time (file_lock.py)
    trainer.json, events.jsonl      what the trainer does, and what has happened
"""
