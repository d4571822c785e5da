//! Tests vperf's call trees and live view with programs whose profiles are known.

use crate::ensure::{ensure, ensure_eq};
use crate::programs::{count, json, text, vperf, vperf_succeeds};
use crate::{Fallible, Outcome};

const GROUP: &str = "vperf";

/// A line of the call tree.
struct Call {
    depth: u64,
    name: String,
    samples: u64,
    self_samples: u64,
}

/// Returns the call tree of the first event in a report's JSON. Each caller comes before its callees.
fn calls(report: &serde_json::Value) -> Option<Vec<Call>> {
    let calls = report["events"][0]["calls"].as_array()?;
    let call = |call: &serde_json::Value| {
        Some(Call {
            depth: call["depth"].as_u64()?,
            name: call["name"].as_str()?.to_owned(),
            samples: call["samples"].as_u64()?,
            self_samples: call["self_samples"].as_u64()?,
        })
    };
    calls.iter().map(call).collect()
}

/// Returns the direct callees of line `at`, except those with at most 2 % of the line's samples. Such samples may
/// have hit an instruction that sets up a frame. The chain of such a sample lacks the caller, so the sampled function
/// appears in the wrong place.
fn callees(calls: &[Call], at: usize) -> Vec<&Call> {
    let least = calls[at].samples / 50;
    calls[at + 1..]
        .iter()
        .take_while(|call| call.depth > calls[at].depth)
        .filter(|call| call.depth == calls[at].depth + 1 && call.samples > least)
        .collect()
}

fn ends(call: &Call, function: &str) -> bool {
    call.name.starts_with("[.]") && call.name.ends_with(&format!("::{function}"))
}

#[apply(guest_test)]
fn call_tree_matches_the_program() -> Outcome {
    let file = "/tmp/tree.vperf";
    let output =
        vperf(&["record", "-g", "-e", "task-clock", "-o", file, "--", "workload", "tree", "--rounds", "1500"])?;
    let said = text(&output.stderr);
    ensure!(output.status.success(), "vperf record failed: {said}");
    ensure!(said.contains(" 0 lost"), "records were lost: {said}");
    let report = vperf_succeeds(&["report", "-i", file, "--call-graph", "--json"])?;
    let report = json(&report.stdout)?;
    let calls = calls(&report).ok_or_else(|| format!("no calls in {report}"))?;
    let tree = calls.iter().position(|call| ends(call, "tree")).ok_or_else(|| format!("no tree in {report}"))?;
    // Chains start at `begin`, which calls `tree`. So only `begin` and the process are above `tree`.
    ensure_eq!(calls[tree].depth, 2, "depth of the tree");
    ensure!(ends(&calls[tree - 1], "begin"), "the caller of the tree is {}", calls[tree - 1].name);
    ensure_eq!(calls[tree - 2].name.as_str(), "workload", "the name of the process");
    let whole = calls[tree].samples;
    ensure!(whole >= 100, "{whole} samples are too few");
    let [often, seldom] = callees(&calls, tree)[..] else {
        return Err(format!("the tree does not have two callees: {report}").into());
    };
    ensure!(
        ends(often, "three_quarters") && ends(seldom, "one_quarter"),
        "the tree's callees are {} and {}",
        often.name,
        seldom.name
    );
    let mut leaves = 0;
    for caller in [often, seldom] {
        let at = calls.iter().position(|call| std::ptr::eq(call, caller));
        let [leaf] = callees(&calls, at.unwrap_or(0))[..] else {
            return Err(format!("{} does not call exactly one leaf: {report}", caller.name).into());
        };
        ensure!(ends(leaf, "hot_leaf"), "the leaf is {}", leaf.name);
        leaves += leaf.samples;
        ensure!(
            caller.self_samples * 20 <= caller.samples,
            "{} only calls the leaf, but has {} of {} samples itself",
            caller.name,
            caller.self_samples,
            caller.samples
        );
        // The other samples are in interrupt handlers. On a busy machine, the handlers take as much time as the
        // program.
        ensure!(
            leaf.self_samples * 10 > leaf.samples,
            "the leaf itself has only {} of its {} samples",
            leaf.self_samples,
            leaf.samples
        );
    }
    ensure!(leaves * 20 >= whole * 19, "the leaf has only {leaves} of {whole} samples");
    // With 100 or more samples, the random deviation is far smaller than these bounds allow.
    let percent = often.samples * 100 / whole;
    ensure!((60..=90).contains(&percent), "the first caller has {percent} % of the samples");
    let table = vperf(&["report", "-i", file, "--call-graph"])?;
    ensure!(
        text(&table.stdout).contains("::three_quarters"),
        "the report's text lacks three_quarters: {}",
        text(&table.stdout)
    );
    let up = vperf(&["report", "-i", file, "--call-graph=up", "--json"])?;
    let up = json(&up.stdout)?;
    let up = self::calls(&up).ok_or("no calls from below")?;
    let leaf = up.iter().position(|call| ends(call, "hot_leaf") && call.depth == 1);
    let callers = callees(&up, leaf.ok_or("no leaf from below")?);
    let names: Vec<&str> = callers.iter().map(|call| call.name.as_str()).collect();
    ensure!(
        callers.len() == 2 && ends(callers[0], "three_quarters") && ends(callers[1], "one_quarter"),
        "the leaf's callers are {names:?}"
    );
    Ok(())
}

#[apply(guest_test)]
fn recording_without_chains_has_no_tree() -> Outcome {
    let file = "/tmp/plain.vperf";
    let command = ["guest-tests", "mark", "3", "10"];
    let record = ["record", "-e", "mark=3", "-o", file, "--"];
    vperf_succeeds(&[&record[..], &command].concat())?;
    for option in ["--call-graph", "--children"] {
        let output = vperf(&["report", "-i", file, option])?;
        let said = text(&output.stderr);
        ensure_eq!(output.status.code(), Some(125), "exit code with {option}: {said}");
        ensure!(said.contains("record -g"), "vperf does not name record -g: {said}");
    }
    Ok(())
}

/// The lines of JSON that `vperf top` writes.
fn frames(args: &[&str]) -> Fallible<Vec<serde_json::Value>> {
    let output = vperf(&[&["top", "--json"], args].concat())?;
    let said = text(&output.stderr);
    if !output.status.success() {
        return Err(format!("{}: {said}", output.status).into());
    }
    text(&output.stdout).lines().map(|line| json(line.as_bytes())).collect()
}

#[apply(guest_test)]
fn top_refreshes_with_fresh_counts() -> Outcome {
    let marks = "guest-tests mark 5 250; sleep 1; guest-tests mark 5 250";
    let frames = frames(&["-d", "0.3", "-e", "mark=5", "--", "sh", "-c", marks])?;
    let samples = |frame: &serde_json::Value| frame["samples"].as_u64().unwrap_or_default();
    let with_samples = frames.iter().filter(|frame| samples(frame) > 0).count();
    ensure!(with_samples >= 2, "both bursts in one frame: {frames:?}");
    // Each mark is in exactly one frame.
    let all: u64 = frames.iter().map(samples).sum();
    ensure_eq!(all, 500, "samples of all {} frames", frames.len());
    let lost: u64 = frames.iter().filter_map(|f| f["lost"].as_u64()).sum();
    ensure_eq!(lost, 0, "lost samples");
    Ok(())
}

#[apply(guest_test)]
fn top_names_the_hot_function() -> Outcome {
    let options = ["-n", "5", "-e", "task-clock", "--limit", "100"];
    let workload = ["--", "workload", "hot", "--ms", "60000"];
    let frames = frames(&[&options[..], &workload].concat())?;
    ensure_eq!(frames.len(), 5, "frames shown");
    // Checks only the last frame, because the first frame may end before the program starts its work.
    let last = &frames[4];
    let rows = last["rows"].as_array().ok_or("no rows")?;
    let is_hot = |row: &&serde_json::Value| {
        let symbol = row["symbol"].as_str();
        symbol.is_some_and(|symbol| symbol.contains("hot_three_quarters"))
    };
    let hot = rows.iter().find(is_hot);
    let hot = hot.ok_or_else(|| format!("the hot function is not in the last frame: {last}"))?;
    ensure_eq!(hot["comm"].as_str(), Some("workload"), "the command: {hot}");
    ensure!(hot["samples"].as_u64() > Some(0), "the hot function has no sample: {hot}");
    Ok(())
}

#[apply(guest_test)]
fn top_ends_with_its_command() -> Outcome {
    let output = vperf(&["top", "-a", "-d", "60", "--", "sh", "-c", "exit 7"])?;
    ensure_eq!(output.status.code(), Some(7), "vperf's exit code: {}", text(&output.stderr));
    let shown = text(&output.stdout);
    ensure!(
        shown.starts_with("# all CPUs: ") && shown.contains(" lost, throttled 0 times"),
        "no summary line: {shown}"
    );
    ensure!(shown.contains("SHARE  SAMPLES  COMM"), "no table: {shown}");
    ensure!(!shown.contains('\x1b'), "escape codes in output that is not for a terminal: {shown:?}");
    Ok(())
}

#[apply(guest_test)]
fn stat_counts_a_group_over_one_time() -> Outcome {
    let marks = ["--", "guest-tests", "mark", "3", "123"];
    let group = ["stat", "--json", "-e", "{mark=3,mark=4,exits-user}"];
    let output = vperf_succeeds(&[&group[..], &marks].concat())?;
    let counts = json(&output.stdout)?;
    ensure_eq!(count(&counts, "mark=3"), Some(123), "marks of value 3: {counts}");
    ensure_eq!(count(&counts, "mark=4"), Some(0), "marks of value 4: {counts}");
    ensure!(count(&counts, "exits-user") >= Some(123), "fewer exits than marks: {counts}");
    Ok(())
}

#[apply(guest_test)]
fn wrong_arguments_name_the_remedy() -> Outcome {
    for (args, remedy) in [
        (&["record", "--call-graph=dwarf", "true"][..], "fp"),
        (&["record", "-F", "1000000", "true"], "at most"),
        (&["record", "-g", "--engine", "batched", "true"], "omit --engine"),
        (&["record", "-e", "{mark=1,mark=2}", "true"], "vperf stat"),
        (&["stat", "-e", "{mark=1", "true"], "{a,b}"),
        (&["top", "-d", "0", "true"], "0.1"),
        (&["top", "-e", "mark=1,mark=2", "true"], "one event"),
    ] {
        let output = vperf(args)?;
        let said = text(&output.stderr);
        ensure_eq!(output.status.code(), Some(125), "exit code of {args:?}: {said}");
        ensure!(said.contains(remedy), "{args:?}: no {remedy:?} in {said}");
    }
    Ok(())
}
