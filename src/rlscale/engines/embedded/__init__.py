"""An inference server in plain torch: SGLang's HTTP API over a decode loop.

HTTP (event loop) ── submit / call ──> Scheduler (one thread) ──> DecodeBatch ──> Decoder (the model)
      ▲                                     │
      └────────────── futures ──────────────┘
"""
