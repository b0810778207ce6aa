"""Elastic membership: active ranks, ranks on standby, and regrouping after the loss of a rank."""
