//! Further requests that meet the condition of a row. Each row has one request in [`super::cases`], although many
//! conditions have alternatives.

use vpmu_testkit::{Fields, MEMORY, WINDOW};

use super::*;

/// Addresses that are not multiples of a page's size, or not in guest memory.
const NO_PAGES: [fn(&mut Scene); 4] = [
    |scene| {
        let page = scene.pages(1)[0];
        scene.name(&[page + 8]);
    },
    |scene| scene.name(&[MEMORY]),
    |scene| scene.name(&[WINDOW]),
    |scene| scene.name(&[u64::MAX - 4095]),
];

fn set_role(scene: &mut Scene, role: u32) {
    scene.put32(offset_of!(LinkRequest, role), role);
}

fn linked_to_task(scene: &mut Scene) {
    let target = scene.opened(&open_of(KIND_MARK, 5, CONTEXT_TASK).sampled(1));
    set_target(scene, target);
}

fn opens() -> Vec<Case> {
    vec![
        case("OPEN-18", |scene| {
            let leader = scene.opened(&mark());
            lead(scene, leader);
            scene.flags(OPEN_AUX_PAUSE, 0);
        }),
        case("OPEN-19", |scene| {
            let leader = scene.opened(&mark());
            let _ = scene.fixture.detach(leader, "");
            lead(scene, leader);
        }),
        case("OPEN-21", |scene| {
            let leader = scene.opened(&mark());
            lead(scene, leader);
            scene.open(|open| open.context = CONTEXT_TASK.into());
        }),
        case("OPEN-21", |scene| {
            let leader = scene.opened(&open_of(KIND_MARK, 5, CONTEXT_TASK).sampled(1));
            lead(scene, leader);
        }),
        case("OPEN-25", |scene| kind(scene, (KIND_RAW, 0), 0)),
        case("OPEN-25", |scene| kind(scene, (KIND_TSC, 5), 0)),
        case("OPEN-25", |scene| kind(scene, (KIND_EXIT_TRACE, EXIT_OTHER + 1), 0)),
        // The simulated host does not count instructions.
        case("OPEN-25", |scene| kind(scene, (KIND_SAMPLE_TRACE, PACE_INSTRUCTIONS), 0)),
        case_with("OPEN-28", |setup| setup.features &= !(1 << F_RING), |_| {}),
        case("OPEN-28", |scene| kind(scene, (KIND_EXIT_TRACE, EXIT_USER), 5)),
        case_with(
            "OPEN-30",
            |setup| setup.features &= !(1 << F_RING),
            |scene| kind(scene, (KIND_EXIT_TRACE, EXIT_IO), 0),
        ),
        case("OPEN-32", |scene| {
            kind(scene, (KIND_SAMPLE_TRACE, PACE_EXITS), 5);
            scene.open(|open| open.engine = ENGINE_BATCHED.into());
        }),
    ]
}

fn rings() -> Vec<Case> {
    let mut cases = vec![
        case("MAP-1", |scene| map_flags(scene, 1 << 9)),
        case("MAP-9", |scene| scene.name(&[])),
        case("MAP-9", |scene| {
            let _ = scene.fixture.detach(scene.event, "");
            map_flags(scene, MAP_WINDOW);
            scene.put32(offset_of!(MapRequest, pages), 4);
        }),
        case("REDIRECT-6", linked_to_task),
        case("REDIRECT-9", |scene| {
            let event = scene.ringed(&mark());
            scene.about(event);
            set_target(scene, 0);
        }),
        case("REDIRECT-10", |scene| {
            let _ = scene.fixture.detach(scene.event, "");
            set_target(scene, 0);
        }),
        case("REDIRECT-11", |scene| {
            let child = scene.child_of(scene.event, &mark());
            scene.about(child);
            set_target(scene, 0);
        }),
        case("WAKEUP-1", |scene| {
            scene.put64(offset_of!(WakeupRequest, every), 0);
        }),
        case("WAKEUP-1", |scene| {
            scene.put32(offset_of!(WakeupRequest, unit), WAKEUP_BYTES);
            scene.put64(offset_of!(WakeupRequest, every), 1 << 32);
        }),
        put("WAKEUP-2", offset_of!(WakeupRequest, unit), 0),
        case("TASK_PAGE-4", |scene| {
            scene.put64(offset_of!(TaskPageRequest, address), MEMORY);
        }),
        case("TASK_PAGE-4", |scene| {
            scene.put64(offset_of!(TaskPageRequest, address), WINDOW);
        }),
        case("TASK_PAGE-4", |scene| {
            scene.put64(offset_of!(TaskPageRequest, address), u64::MAX - 4095);
        }),
    ];
    cases.extend(NO_PAGES.map(|act| case("MAP-11", act)));
    cases
}

fn areas() -> Vec<Case> {
    let mut cases = vec![
        case("MAP_AUX-1", |scene| map_flags(scene, 1 << 9)),
        case_with("MAP_AUX-2", |setup| setup.features &= !(1 << F_RING), |_| {}),
        case_with("MAP_AUX-2", |setup| setup.features &= !(1 << F_AUX), |scene| map_flags(scene, MAP_DRIVER_OWNED)),
        case("MAP_AUX-6", |scene| {
            let child = scene.child_of(scene.event, &trace());
            scene.about(child);
            map_flags(scene, MAP_DRIVER_OWNED);
        }),
        case("MAP_AUX-7", |scene| {
            let target = scene.event;
            scene.about_new(&trace());
            let _ = scene.fixture.redirect(scene.event, target);
        }),
        case("MAP_AUX-8", |scene| {
            let target = scene.event;
            scene.about_new(&trace());
            let _ = scene.fixture.redirect(scene.event, target);
            map_flags(scene, MAP_DRIVER_OWNED);
        }),
        case("MAP_AUX-9", |scene| scene.name(&[])),
        case("MAP_AUX-9", |scene| scene.name_fresh(128)),
        case("MAP_AUX-12", |scene| {
            let event = scene.opened(&trace());
            let pages = scene.pages(2);
            let _ = scene.fixture.map_pages(event, MAP_WRITABLE, &pages);
            scene.about(event);
            let fresh = scene.pages(1)[0];
            scene.name(&[fresh, pages[0]]);
        }),
    ];
    cases.extend(NO_PAGES.map(|act| case("MAP_AUX-11", act)));
    cases
}

fn others() -> Vec<Case> {
    vec![
        case("DETACH-5", |scene| {
            scene.opened(&mark().leader(scene.event));
        }),
        case("LINK-1", |scene| set_role(scene, 0)),
        case("LINK-3", |scene| scene.about(0)),
        case("LINK-4", |scene| set_target(scene, 0)),
        case("LINK-7", |scene| scene.about_new(&open_of(KIND_MARK, 5, 1).sampled(1))),
        case("LINK-7", |scene| scene.about_new(&open_of(KIND_MARK, 5, CONTEXT_TASK).sampled(1))),
        case("LINK-7", linked_to_task),
        case("LINK-10", |scene| {
            let target = scene.opened(&mark());
            set_target(scene, target);
            set_role(scene, LINK_STOPPER);
            let _ = scene.fixture.link(scene.event, target, LINK_STOPPER);
        }),
        case("LINK-11", |scene| {
            let (target, other) = (scene.opened(&mark()), scene.opened(&mark()));
            set_target(scene, target);
            set_role(scene, LINK_STOPPER);
            let _ = scene.fixture.link(other, target, LINK_STOPPER);
        }),
        case("COMMAND-3", |scene| {
            scene.operate(COMMAND_FLUSH, 0, 0);
            scene.command.reserved = 1.into();
        }),
        case("COMMAND-3", |scene| scene.operate(COMMAND_FLUSH, 1, 0)),
        case("COMMAND-3", |scene| scene.operate(COMMAND_FLUSH, 0, 1)),
        case("COMMAND-3", |scene| {
            scene.about(0);
            scene.operate(COMMAND_FLUSH, 1, 0);
        }),
        case("COMMAND-2", |scene| {
            scene.about(0);
            scene.operate(COMMAND_FLUSH, 0, 0);
            scene.by = 1 - scene.of;
        }),
    ]
}

pub(super) fn alternatives() -> Vec<Case> {
    [opens(), rings(), areas(), others()].into_iter().flatten().collect()
}
