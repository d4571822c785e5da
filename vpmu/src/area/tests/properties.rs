//! Random writes and reads: the writer must match a model that keeps every byte.

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Step {
    Begin,
    BeginAt(u64, u64),
    Look,
    Put(u64),
    Skip(u64),
    End,
    /// The reader consumes this percentage of the unread data.
    Consume(u64),
    Lie(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let len = prop_oneof![
        4 => (1_u64..40).prop_map(|words| words * 8),
        1 => (1_u64..1500).prop_map(|words| words * 8),
    ];
    prop_oneof![
        4 => Just(Step::Begin),
        1 => (any::<u64>(), 0_u64..5000).prop_map(|(head, room)| Step::BeginAt(head / 8 * 8, room)),
        1 => Just(Step::Look),
        8 => len.clone().prop_map(Step::Put),
        3 => len.prop_map(Step::Skip),
        3 => Just(Step::End),
        4 => (0_u64..=100).prop_map(Step::Consume),
        1 => any::<u64>().prop_map(Step::Lie),
    ]
}

/// A model of the writer. It stores word by word.
struct Model {
    size: u64,
    overwrite: bool,
    head: u64,
    seen_tail: u64,
    begun: Option<u64>,
    shown: u64,
    /// The expected contents of the area, by offset.
    words: Vec<u64>,
}

impl Model {
    fn room(&self) -> u64 {
        if self.overwrite {
            return self.size;
        }
        // A tail is valid if its distance behind the head is at most the area's size. Search all such tails.
        (0..=self.size)
            .step_by(8)
            .chain(0..=self.size)
            .find(|held| self.seen_tail.wrapping_add(*held) == self.head)
            .map_or(0, |held| self.size - held)
    }

    fn fill(&mut self, len: u64, value: impl Fn(u64) -> u64) -> bool {
        if self.begun.is_none() || len > self.room() {
            return false;
        }
        for at in (0..len).step_by(8) {
            let index = usize::try_from(self.head % self.size / 8).expect("small");
            self.words[index] = value(at);
            self.head = self.head.wrapping_add(8);
        }
        true
    }
}

/// A word that encodes its position.
fn word(head: u64, at: u64) -> u64 {
    head.wrapping_add(at).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn writer_matches_its_model(
        steps in prop::collection::vec(step(), 1..150),
        power in 0_u32..3,
        overwrite in any::<bool>(),
    ) {
        let mut pages = Fake::new(1 << power);
        let size = pages.size();
        let mut writer = Writer::new(size, overwrite);
        let mut model = Model {
            size,
            overwrite,
            head: 0,
            seen_tail: 0,
            begun: None,
            shown: 0,
            words: pages.data.clone(),
        };
        for step in steps {
            match step {
                Step::Begin => {
                    let begun = writer.begin(&pages);
                    if model.begun.is_some() {
                        prop_assert!(matches!(begun, Err(Refused::Nested)));
                    } else {
                        if !overwrite {
                            model.seen_tail = pages.tail.get();
                        }
                        model.begun = Some(model.head);
                        prop_assert_eq!(begun.expect("begun"), model.room());
                    }
                }
                Step::BeginAt(head, room) => {
                    let room = room.min(size);
                    let begun = writer.begin_at(head, room);
                    prop_assert_eq!(begun.is_ok(), model.begun.is_none());
                    if begun.is_ok() {
                        model.head = head;
                        model.seen_tail = head.wrapping_sub(size - room);
                        model.begun = Some(head);
                    }
                }
                Step::Look => {
                    writer.look(&pages).expect("memory");
                    if !overwrite {
                        model.seen_tail = pages.tail.get();
                    }
                }
                Step::Put(len) if len <= size => {
                    let head = writer.head();
                    let words: Vec<u64> = (0..len).step_by(8).map(|at| word(head, at)).collect();
                    let put = writer.put(&mut pages, &words);
                    prop_assert_eq!(put.is_ok(), model.fill(len, |at| word(head, at)));
                }
                Step::Skip(len) if len <= size => {
                    let skipped = writer.skip(&mut pages, len);
                    prop_assert_eq!(skipped.is_ok(), model.fill(len, |_| 0));
                }
                Step::End => {
                    let ended = writer.end(Some(&pages)).ok();
                    let expected = model.begun.take().map(|offset| {
                        (offset, model.head.wrapping_sub(offset))
                    });
                    if expected.is_some_and(|(_, size)| size > 0) {
                        model.shown = model.head;
                    }
                    prop_assert_eq!(ended.map(|written| (written.offset, written.size)), expected);
                }
                Step::Consume(share) => {
                    let (head, tail) = (pages.head.get(), pages.tail.get());
                    let unread = head.wrapping_sub(tail);
                    pages.tail.set(tail.wrapping_add(unread / 100 * share));
                }
                Step::Lie(tail) => pages.tail.set(tail),
                Step::Put(_) | Step::Skip(_) => {}
            }
            prop_assert_eq!(pages.head.get(), model.shown);
            prop_assert_eq!(writer.get().is_some(), model.begun.is_some());
            if let Some(window) = writer.get() {
                prop_assert_eq!((window.head, window.room), (model.head, model.room()));
            }
            prop_assert!(pages.data == model.words);
        }
    }

    /// If the reader stores only valid tails, unread bytes are never overwritten, and the reported chunks are
    /// contiguous.
    #[test]
    fn spans_cover_every_written_byte(
        steps in prop::collection::vec((1_u64..40, 0_u64..=3, any::<bool>(), 0_u32..8), 1..200),
        power in 0_u32..3,
        watermark in 64_u64..5000,
    ) {
        let mut pages = Fake::new(1 << power);
        let mut area = DeviceOwned::new(pages.size(), false, watermark);
        let (mut reported, mut wakes, mut written, mut lost, mut read) = (0, 0, 0, 0, 0);
        let mut full = false;
        for (words, share, end, skip) in steps {
            let head = area.head();
            let len = words * 8;
            let skip = if skip == 0 { 64 } else { 0 };
            let body: Vec<u64> = (0..len).step_by(8).map(|at| word(head + skip, at)).collect();
            let appended = area.append(&mut pages, &Entry { skip, ..entry(&body) });
            let fits = head + skip + len - read <= pages.size();
            prop_assert_eq!(appended.whole, fits);
            prop_assert_eq!(appended.written, if fits { skip + len } else { 0 });
            let marks = |position: u64| position / watermark;
            let wake = if fits { marks(head) != marks(head + skip + len) } else { !full };
            prop_assert_eq!(appended.wake, wake);
            full = !fits;
            if fits { written += skip + len } else { lost += len }
            let ended = appended.chunk.into_iter().chain(end.then(|| area.end(&pages, 0)).flatten());
            for chunk in ended {
                prop_assert_eq!(chunk.offset, reported);
                reported += chunk.size;
                prop_assert_eq!(pages.head.get(), reported);
            }
            wakes += u64::from(wake);
            // Published data is readable, word by word.
            let until = read + (pages.head.get() - read) / 3 * share / 8 * 8;
            for at in (read..until).step_by(8) {
                let found = pages.words(at, 8)[0];
                prop_assert!(found == word(at, 0) || found == 0, "at {}", at);
            }
            read = until;
            pages.tail.set(read);
        }
        let rest = area.end(&pages, 0).map_or(0, |chunk| chunk.size);
        prop_assert_eq!(reported + rest, written);
        prop_assert!(lost == 0 || wakes > 0);
    }
}
