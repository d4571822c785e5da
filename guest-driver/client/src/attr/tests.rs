use super::*;

#[test]
fn modifiers_exclude_the_other_mode() {
    let attr = EventAttr::new(0, 0);
    let user = attr.clone().modified("u").unwrap();
    assert!(user.exclude_kernel && !user.exclude_user);
    let kernel = attr.clone().modified("k").unwrap();
    assert!(kernel.exclude_user && !kernel.exclude_kernel);
    assert_eq!(attr.clone().modified("uk").unwrap(), attr);
    for wrong in ["", "uu", "x", "ux", "uku"] {
        assert_eq!(attr.clone().modified(wrong), Err(AttrError::Modifier(wrong.into())));
    }
}

#[test]
fn perf_event_attr_keeps_every_field() {
    let raw = EventAttr {
        inherit: true,
        enable_on_exec: true,
        exclude_user: true,
        ..EventAttr::new(9, 7).sampling(5).wakeup_every(3)
    }
    .to_raw(false);
    assert_eq!((raw.type_, raw.config), (9, 7));
    assert_eq!(raw.size as usize, size_of::<perf_event_attr>());
    assert_eq!((raw.sample_type, raw.read_format), (SAMPLE_DEFAULT, FORMAT_ALL));
    assert_eq!((raw.disabled(), raw.inherit(), raw.enable_on_exec()), (1, 1, 1));
    assert_eq!((raw.exclude_user(), raw.exclude_kernel(), raw.watermark()), (1, 0, 0));
}

#[test]
fn requested_sample_fields_set_their_bits() {
    let attr = EventAttr {
        sample_id_all: true,
        backward: true,
        pinned: true,
        inherit_stat: true,
        exclude_callchain_user: true,
        ..EventAttr::new(9, 7)
            .sampling_at(999)
            .with_call_chains(30)
            .with_user_registers(0x3)
            .with_registers(0x100)
            .with_user_stack(512)
            .reading_group()
    };
    let raw = attr.to_raw(false);
    let more = SAMPLE_CALLCHAIN | SAMPLE_REGS_USER | SAMPLE_REGS_INTR | SAMPLE_STACK_USER;
    assert_eq!(raw.sample_type, SAMPLE_DEFAULT | more);
    assert_eq!(raw.read_format, FORMAT_ALL | FORMAT_GROUP);
    assert_eq!((raw.freq(), raw.sample_max_stack), (1, 30));
    assert_eq!((raw.sample_regs_user, raw.sample_regs_intr), (0x3, 0x100));
    assert_eq!(raw.sample_stack_user, 512);
    assert_eq!((raw.sample_id_all(), raw.write_backward(), raw.pinned()), (1, 1, 1));
    assert_eq!(raw.inherit_stat(), 1);
    assert_eq!((raw.exclude_callchain_user(), raw.exclude_callchain_kernel()), (1, 0));
    assert_eq!(EventAttr::new(9, 7).sampling(5).to_raw(false).freq(), 0);
}

#[test]
fn traces_have_their_watermark_and_what_pauses_them() {
    let attr = EventAttr::new(9, 7).tracing(4096);
    let raw = attr.to_raw(false);
    assert_eq!(raw.aux_watermark, 4096);
    assert_eq!(raw.read_format, FORMAT_ALL | FORMAT_LOST);
    #[expect(unsafe_code, reason = "its type is a union")]
    let config1 = |attr: EventAttr| {
        // SAFETY: every member of the union is a plain number.
        unsafe { attr.to_raw(true).__bindgen_anon_3.config1 }
    };
    assert_eq!(config1(EventAttr::new(9, 7)), uapi::CONFIG1_RING);
    assert_eq!(config1(EventAttr::new(9, 7).starting_paused()), uapi::CONFIG1_RING | uapi::CONFIG1_AUX_START_PAUSED);
    assert_eq!(config1(EventAttr::new(9, 7).pausing()), uapi::CONFIG1_RING | uapi::CONFIG1_AUX_PAUSE);
    assert_eq!(config1(EventAttr::new(9, 7).resuming()), uapi::CONFIG1_RING | uapi::CONFIG1_AUX_RESUME);
}

#[test]
fn attr_from_kernel_bytes_equals_request() {
    let some = EventAttr {
        pid: -1,
        cpu: 3,
        persistent: true,
        exclude_kernel: true,
        backward: true,
        sample_id_all: true,
        pinned: true,
        aux_watermark: 77,
        ..EventAttr::new(9, 7)
            .sampling_at(5)
            .with_call_chains(30)
            .with_user_registers(0x3)
            .with_registers(0x100)
            .with_user_stack(512)
            .wakeup_every(3)
            .sampled_by(Engine::Exit)
    };
    let others = EventAttr {
        disabled: false,
        freq: false,
        inherit: true,
        inherit_stat: true,
        enable_on_exec: true,
        exclude_kernel: false,
        exclude_user: true,
        watermark: true,
        exclude_callchain_user: true,
        exclude_callchain_kernel: true,
        aux_pause: true,
        aux_start_paused: true,
        aux_resume: true,
        ..some.clone()
    };
    for attr in [some, others] {
        let raw = attr.to_raw(false);
        let mut bytes = [0; vpmu_abi::uapi::ATTR_SIZE];
        #[expect(unsafe_code, reason = "its fields have unions among them")]
        // SAFETY: the kernel's struct is at least as long as `bytes`, so both ranges are valid. The
        // struct holds only plain numbers.
        unsafe {
            std::ptr::copy_nonoverlapping((&raw const raw).cast::<u8>(), bytes.as_mut_ptr(), bytes.len());
        }
        assert_eq!(EventAttr::from_bytes(&bytes, 3, Engine::Exit), attr);
    }
}

#[test]
fn options_without_perf_bit_are_in_config1() {
    let attr = EventAttr::new(9, 7);
    assert_eq!(attr.config1(false), 0);
    assert_eq!(attr.clone().persistent().config1(false), uapi::CONFIG1_PERSISTENT);
    assert_eq!(attr.clone().enabled_on_starter().config1(false), uapi::CONFIG1_ENABLE_ON_STARTER);
    assert_eq!(attr.clone().sampled_by(Engine::Batched).config1(false), 2 << uapi::CONFIG1_ENGINE_SHIFT);
    let trigger = attr.sampling(9).triggering(4);
    assert_eq!((trigger.period, trigger.sample_type), (4, 0));
    assert_eq!(trigger.engine, Engine::Exit);
}
