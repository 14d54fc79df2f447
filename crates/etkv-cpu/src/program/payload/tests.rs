//! Valid payloads, and payloads that are refused.

use super::*;
use crate::refused::refused;

const GOOD: &str = r#"{"op": "update_and_attend", "version": 1, "program": "p", "call": 0, "n_calls": 2,
    "n_layers": 2, "layer": 1, "scale": 0.5, "inputs": [2, 0, 0, 1], "logits": "selected"}"#;

#[test]
fn a_call_is_read() {
    let Payload::UpdateAndAttend(attend) = Payload::read(GOOD.as_bytes()).unwrap() else {
        panic!("another op");
    };
    let LayerCall { layer, logits, n_recurrent, .. } = attend.call;
    assert_eq!((layer, logits, n_recurrent), (1, Logits::Selected, 0));
    assert_eq!(n_inputs(&attend.inputs.map(Some)), 3);
    let rows = Payload::read(br#"{"op": "select_rows", "version": 1}"#).unwrap();
    assert!(matches!(rows, Payload::SelectRows));
    let choice = Payload::read(br#"{"op": "select_by_capacity", "version": 1, "limit": 4096}"#);
    let Payload::SelectByCapacity(choice) = choice.unwrap() else {
        panic!("another op");
    };
    assert_eq!(choice.limit, 4096);
}

const CONVOLVE: &str = r#"{"op": "update_and_convolve", "program": "5f", "call": 0, "n_calls": 5,
    "n_layers": 1, "n_recurrent": 4, "logits": "selected", "layer": 0, "activation": "silu",
    "channels": 160, "width": 4, "version": 1, "inputs": [0, 1, null, 2]}"#;

const SCAN: &str = r#"{"op": "update_and_scan", "program": "5f", "call": 1, "n_calls": 5, "n_layers": 1,
    "n_recurrent": 4, "logits": "selected", "layer": 1, "scale": 0.25, "k_heads": 2, "heads": 4,
    "k_dim": 16, "v_dim": 24, "channel_decay": false, "version": 1, "inputs": [0, 1, 2, 3, null, 4]}"#;

#[test]
fn calls_of_recurrent_layers_are_read() {
    let Payload::UpdateAndConvolve(convolve) = Payload::read(CONVOLVE.as_bytes()).unwrap() else {
        panic!("another op");
    };
    assert_eq!((convolve.activation, convolve.width), (Activation::Silu, 4));
    assert_eq!(n_inputs(&convolve.inputs), 3);
    let Payload::UpdateAndScan(scan) = Payload::read(SCAN.as_bytes()).unwrap() else {
        panic!("another op");
    };
    assert_eq!((scan.scan.heads, scan.scan.v_dim, n_inputs(&scan.inputs)), (4, 24, 5));
    for (text, from, to, told) in [
        (CONVOLVE, "[0, 1, null, 2]", "[0, null, 1, 2]", "input 1 of a call is absent"),
        (CONVOLVE, "[0, 1, null, 2]", "[0, 1, null, 4]", "from 0 to 3"),
        (CONVOLVE, "silu", "gelu", "damaged"),
        (CONVOLVE, "\"layer\": 0", "\"layer\": 4", "layer below 4, got 4"),
        (SCAN, "0.25", "1e39", "scale"),
        (SCAN, "\"k_dim\": 16, ", "", "damaged"),
        (SCAN, "[0, 1, 2, 3, null, 4]", "[0, 1, 2, 3, 4, null]", "input 5 of a call is absent"),
    ] {
        refused(damaged(text, from, to), Status::Program, told);
    }
}

/// Reads a payload in which `from` is replaced by `to`.
fn damaged(text: &str, from: &str, to: &str) -> Result<Payload> {
    let other = text.replacen(from, to, 1);
    assert_ne!(other, text);
    Payload::read(other.as_bytes())
}

const SINKS: &str = r#"{"op": "update_and_attend_sinks", "version": 1, "program": "p", "call": 0, "n_calls": 2,
    "n_layers": 2, "layer": 1, "scale": 0.5, "softcap": 50.0, "inputs": [2, 0, 0, 1, 3],
    "logits": "selected"}"#;

#[test]
fn sinks_and_softcaps_are_read() {
    let read = |text: &str| match Payload::read(text.as_bytes()) {
        Ok(Payload::UpdateAndAttendSinks(attend)) => attend,
        other => panic!("{other:?}"),
    };
    let attend = read(SINKS);
    assert_eq!((attend.softcap, n_inputs(&attend.inputs)), (Some(50.0), 4));
    let attend = read(&SINKS.replace("1, 3]", "1, null]").replace("50.0", "null"));
    assert_eq!((attend.softcap, n_inputs(&attend.inputs)), (None, 3));
    for (from, to, told) in [
        ("50.0", "0.0", "expected a softcap from 1e-30 to 1e30, got 0"),
        ("50.0", "-2.0", "got -2"),
        ("[2, 0, 0, 1, 3]", "[2, 0, 0, 1]", "damaged"),
        ("[2, 0, 0, 1, 3]", "[2, 0, 0, null, 3]", "input 3 of a call is absent"),
        ("[2, 0, 0, 1, 3]", "[2, 0, 0, 1, 5]", "from 0 to 4"),
        ("\"layer\": 1", "\"layer\": 2", "layer below 2, got 2"),
        ("0.5", "1e39", "scale"),
    ] {
        refused(damaged(SINKS, from, to), Status::Program, told);
    }
}

#[test]
fn damage_is_refused() {
    for (from, to, told) in [
        ("update_and_attend", "update", "unknown variant `update`"),
        ("\"call\": 0", "\"call\": 2", "below 2, got 2"),
        ("\"call\": 0", "\"call\": -1", "damaged"),
        ("\"n_calls\": 2", "\"n_calls\": 100000000000000", "at most 65536 calls"),
        ("\"layer\": 1", "\"layer\": 2", "layer below 2, got 2"),
        ("[2, 0, 0, 1]", "[2, 0, 4, 1]", "from 0 to 3, got [2, 0, 4, 1]"),
        ("[2, 0, 0, 1]", "[2, 0, 1]", "damaged"),
        ("0.5", "1e39", "scale"),
        ("}", "", "damaged"),
    ] {
        refused(damaged(GOOD, from, to), Status::Program, told);
    }
}

#[test]
fn other_versions_are_refused() {
    let other = damaged(GOOD, "\"version\": 1", "\"version\": 2");
    refused(other, Status::Version, "version 1, got 2");
}
