"""An inference server in torch alone: SGLang's HTTP API over an own decode loop.

HTTP (event loop) ── submit / call ──> Scheduler (one thread) ──> lanes of slots ──> Decoder (the model)
      ▲                                     │
      └────────────── futures ──────────────┘
"""
