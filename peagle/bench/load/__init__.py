"""The load: closed-loop users on peagle's engine or on an OpenAI-compatible server."""
