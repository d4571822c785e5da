use super::*;
use crate::recording::composed::{CONTEXT_KERNEL, CONTEXT_USER, clock, process, recorded, sample};

/// Samples of the process `work`, whose functions have no names, and of an unknown process.
fn recording() -> Profile {
    recorded(vec![clock()], |output| {
        output.change(&process(7, "work", &[(0x1000, "/nonexistent/work"), (0x2000, "[vdso]")])).unwrap();
        for (pid, ip) in [(7, 0x1234), (7, 0x1fff), (7, 0x2010), (9, 0x9000)] {
            output.sample(0, &sample(pid, ip), &[]).unwrap();
        }
        let kernel = vpmu_client::Sample { user: false, period: 4_000_000, cpu: 1, ..sample(0, u64::MAX - 9000) };
        output.sample(0, &kernel, &[]).unwrap();
        output.lost(0, 3, 100).unwrap();
        output.lost(0, 2, 100).unwrap();
        output.throttle(0, 100).unwrap();
    })
}

#[test]
fn rows_have_names_of_task_file_and_function() {
    let profile = profiles(&recording(), &[Key::Comm, Key::Object, Key::Symbol], View::default()).remove(0);
    let rows: Vec<(String, u64)> = profile.rows.iter().map(|row| (row.cells.join(" "), row.samples)).collect();
    let expected = [
        ("swapper/1 [kernel] [k] [kernel]", 1),
        ("work /nonexistent/work [.] [work]", 2),
        (":9 [unknown] [.] [unknown]", 1),
        ("work [vdso] [.] [vdso]", 1),
    ];
    assert_eq!(rows, expected.map(|(row, samples)| (row.to_owned(), samples)));
    assert_eq!((profile.samples, profile.lost, profile.throttled), (5, 5, 1));
    assert_eq!((profile.every, profile.freq, profile.unit), (1_000_000, false, "ns"));
}

#[test]
fn shares_are_of_the_event_and_sum_up() {
    let profile = profiles(&recording(), &[Key::Cpu], View::default()).remove(0);
    let rows: Vec<_> = profile.rows.iter().map(|row| (row.cells[0].as_str(), row.percent)).collect();
    assert_eq!(rows, [("0", 50.0), ("1", 50.0)]);
}

/// Code in the vDSO calls the kernel once, and calls `work` twice. The second of these two calls is the last instruction
/// of the vDSO's mapping.
fn chains() -> Profile {
    recorded(vec![clock()], |output| {
        output.change(&process(7, "work", &[(0x1000, "[vdso]"), (0x2000, "/nonexistent/work")])).unwrap();
        let mut put = |ip, user, chain: &[u64], period| {
            let chain = chain.to_vec();
            output.sample(0, &vpmu_client::Sample { user, chain, period, ..sample(7, ip) }, &[]).unwrap();
        };
        // 0x9000 is not code: the function at 0x1180 kept no frame pointer.
        put(0x2100, true, &[CONTEXT_USER, 0x2100, 0x1180, 0x9000, 0x1300], 600);
        put(0x2108, true, &[CONTEXT_USER, 0x2108, 0x2000], 200);
        let kernel = u64::MAX - 9000;
        put(kernel, false, &[CONTEXT_KERNEL, kernel, CONTEXT_USER, 0x1190], 200);
    })
}

#[test]
fn call_tree_merges_equal_callers() {
    let view = |direction| View { children: false, calls: Some(direction) };
    let lines = |direction| -> Vec<String> {
        let profile = profiles(&chains(), &[Key::Symbol], view(direction)).remove(0);
        let calls = profile.calls.unwrap();
        calls.iter().map(|call| format!("{} {} {}", call.depth, call.name, call.percent)).collect()
    };
    assert_eq!(
        lines(Direction::Down),
        ["0 work 100", "1 [.] [vdso] 100", "2 [.] [work] 80", "2 [k] [kernel] 20"],
        "the call that returns to 0x2000 is in the mapping before it"
    );
    assert_eq!(
        lines(Direction::Up),
        ["0 work 100", "1 [.] [work] 80", "2 [.] [vdso] 80", "1 [k] [kernel] 20", "2 [.] [vdso] 20"]
    );
    assert!(has_chains(&chains()) && !has_chains(&recording()));
}

#[test]
fn callers_share_what_they_call() {
    let view = View { children: true, calls: None };
    let profile = profiles(&chains(), &[Key::Symbol], view).remove(0);
    let rows: Vec<_> =
        profile.rows.iter().map(|row| (row.cells[0].as_str(), row.percent, row.children_percent)).collect();
    assert_eq!(
        rows,
        [("[.] [vdso]", 0.0, Some(100.0)), ("[.] [work]", 80.0, Some(80.0)), ("[k] [kernel]", 20.0, Some(20.0)),]
    );
}
