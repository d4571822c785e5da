//! The control queue: takes requests apart and answers them. Every number here comes from the
//! guest and is checked before use.

mod aux;
mod links;
mod open;
mod persistent;
mod rings;

use std::io::{Read, Write};

use vm_memory::GuestAddress;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes};

pub(crate) use self::open::Maker;
use self::persistent::changes;
use crate::abi::{
    CONTROL_ATTACH, CONTROL_CATALOGUE, CONTROL_CLOSE, CONTROL_DETACH, CONTROL_LINK, CONTROL_MAP,
    CONTROL_MAP_AUX, CONTROL_OPEN, CONTROL_PAUSE, CONTROL_PERSISTENT, CONTROL_REDIRECT,
    CONTROL_TASK_PAGE, CONTROL_UNMAP, CONTROL_UNMAP_AUX, CatalogueEntry, CatalogueRequest,
    ControlHeader, ControlReply, F_TASK_PAGE, MapRequest, OpenReply, OpenRequest, PersistentEvent,
    QUEUE_CONTROL, TaskPageRequest,
};
use crate::catalogue::Catalogue;
use crate::errno::{Errno, status};
use crate::event::Host;
use crate::queues::{BadChain, Chain, put};
use crate::state::State;

/// What serving the control queue came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Served {
    /// The driver wants an interrupt for it.
    pub(crate) interrupt: bool,
    /// A request stands there still: it needs [`Host::guest_ips`].
    pub(crate) asks_guest_ips: bool,
}

impl State {
    /// Serves the control queue.
    pub(crate) fn serve_control(&mut self, host: &Host<'_>, catalogue: &Catalogue) -> Served {
        let index = usize::from(QUEUE_CONTROL);
        let mut served = false;
        let mut asks_guest_ips = false;
        for _ in 0..self.queues.bound(index) {
            let Some(chain) = self.queues.take(index) else {
                break;
            };
            if host.guest_ips.is_none() && self.asks_guest_ips(&chain) {
                self.queues.put_back(index);
                asks_guest_ips = true;
                break;
            }
            self.metrics.control_requests += 1;
            let len = self
                .answer(host, catalogue, &chain)
                .unwrap_or_else(|BadChain| {
                    self.metrics.bad_requests += 1;
                    0
                });
            self.queues.give_back(index, &chain, len);
            served = true;
        }
        Served {
            interrupt: served && self.queues.wants_interrupt(index),
            asks_guest_ips,
        }
    }

    /// Whether a request's answer depends on what the host reports of guests.
    fn asks_guest_ips(&self, chain: &Chain) -> bool {
        self.copy_request(chain).is_ok_and(|request| {
            OpenRequest::read_from_prefix(&request).is_ok_and(|(request, _)| {
                request.header.op.get() == CONTROL_OPEN && self.engine_asks(&request)
            })
        })
    }

    /// Carries out one request; bytes of the answer.
    fn answer(
        &mut self,
        host: &Host<'_>,
        catalogue: &Catalogue,
        chain: &Chain,
    ) -> Result<u32, BadChain> {
        let request = self.copy_request(chain)?;
        let (room, mut writer) = chain.writer()?;
        let Ok((header, _)) = ControlHeader::read_from_prefix(&request) else {
            return simple(room, &mut writer, || Err(Errno::EINVAL));
        };
        if header.reserved.get() != 0 {
            return simple(room, &mut writer, || Err(Errno::EINVAL));
        }
        let event = header.event.get();
        // What was sampled before the request is written as the request finds things.
        self.settle(host);
        match header.op.get() {
            CONTROL_OPEN => {
                enough(room, size_of::<OpenReply>())?;
                let opened = self.open(host, catalogue, &request);
                let (engine, id) = opened.unwrap_or_default();
                let reply = OpenReply {
                    status: status(&opened).into(),
                    engine: engine.into(),
                    id: id.into(),
                };
                put(&mut writer, &reply)?;
                Ok(wire_len::<OpenReply>(1))
            }
            CONTROL_CATALOGUE => {
                enough(room, size_of::<ControlReply>())?;
                let fit = (room - size_of::<ControlReply>()) / size_of::<CatalogueEntry>();
                entries(&mut writer, &part(catalogue, &request, fit))
            }
            CONTROL_PERSISTENT => {
                enough(room, size_of::<ControlReply>())?;
                let fit = (room - size_of::<ControlReply>()) / size_of::<PersistentEvent>();
                entries(&mut writer, &self.list_part(&request, fit))
            }
            op if changes(op) && self.is_operators(event) => {
                simple(room, &mut writer, || Err(Errno::EPERM))
            }
            CONTROL_DETACH => simple(room, &mut writer, || self.detach_as(&request)),
            CONTROL_ATTACH => simple(room, &mut writer, || self.reattach(event)),
            CONTROL_CLOSE => simple(room, &mut writer, || self.close(host, event)),
            CONTROL_MAP => valued(room, &mut writer, || self.map(host, &request)),
            CONTROL_UNMAP => simple(room, &mut writer, || self.unmap(host, event)),
            CONTROL_REDIRECT => simple(room, &mut writer, || self.redirect(host, &request)),
            CONTROL_PAUSE => simple(room, &mut writer, || self.pause(&request)),
            CONTROL_MAP_AUX => simple(room, &mut writer, || self.map_aux(host, &request)),
            CONTROL_UNMAP_AUX => simple(room, &mut writer, || self.unmap_aux(host, event)),
            CONTROL_LINK => simple(room, &mut writer, || self.link(&request)),
            CONTROL_TASK_PAGE => simple(room, &mut writer, || self.task_page(&request)),
            _ => simple(room, &mut writer, || Err(Errno::EOPNOTSUPP)),
        }
    }

    /// The request's bytes, of which no more are copied than the longest request has.
    fn copy_request(&self, chain: &Chain) -> Result<Vec<u8>, BadChain> {
        let limits = &self.settings.limits;
        let pages = (limits.max_ring_pages as usize + 1).max(limits.max_aux_pages as usize);
        let longest = size_of::<MapRequest>() + pages * size_of::<U64>();
        let longest = longest.max(size_of::<OpenRequest>());
        let (len, reader) = chain.reader()?;
        let mut request = Vec::with_capacity(len.min(longest));
        reader
            .take(longest as u64)
            .read_to_end(&mut request)
            .map_err(|_| BadChain)?;
        Ok(request)
    }

    fn task_page(&mut self, request: &[u8]) -> Result<(), Errno> {
        if self.features & 1 << F_TASK_PAGE == 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let (request, _) = TaskPageRequest::read_from_prefix(request).map_err(|_| Errno::EINVAL)?;
        let vcpu = request.vcpu.get();
        let page = Some(GuestAddress(request.address.get())).filter(|page| page.0 != 0);
        if request.header.event.get() != 0
            || request.reserved.get() != 0
            || vcpu >= self.settings.vcpus
            || page.is_some_and(|page| !self.is_page(page))
        {
            return Err(Errno::EINVAL);
        }
        self.output.set_task_page(vcpu, page);
        Ok(())
    }
}

/// The part of the catalogue that is asked for, `fit` entries at most.
fn part(catalogue: &Catalogue, request: &[u8], fit: usize) -> Result<Vec<CatalogueEntry>, Errno> {
    let (request, _) = CatalogueRequest::read_from_prefix(request).map_err(|_| Errno::EINVAL)?;
    if request.header.event.get() != 0 {
        return Err(Errno::EINVAL);
    }
    let rest = catalogue
        .entries()
        .get(request.first.get() as usize..)
        .ok_or(Errno::EINVAL)?;
    let count = fit.min(request.count.get() as usize);
    Ok(rest.iter().take(count).map(|entry| entry.wire()).collect())
}

/// Answers with a [`ControlReply`] and the entries that it counts, for which there is room.
fn entries<T: IntoBytes + Immutable>(
    writer: &mut impl Write,
    entries: &Result<Vec<T>, Errno>,
) -> Result<u32, BadChain> {
    let some = entries.as_deref().unwrap_or(&[]);
    let count = u32::try_from(some.len()).unwrap_or(u32::MAX);
    let reply = ControlReply {
        status: status(entries).into(),
        value: count.into(),
    };
    put(writer, &reply)?;
    some.iter().try_for_each(|entry| put(writer, entry))?;
    Ok(wire_len::<ControlReply>(1) + wire_len::<T>(count))
}

/// Answers with a [`ControlReply`] without a value, if there is room for it; nothing is done otherwise.
fn simple(
    room: usize,
    writer: &mut impl Write,
    act: impl FnOnce() -> Result<(), Errno>,
) -> Result<u32, BadChain> {
    valued(room, writer, || act().map(|()| 0))
}

/// As [`simple`], with the value that comes of it.
fn valued(
    room: usize,
    writer: &mut impl Write,
    act: impl FnOnce() -> Result<u32, Errno>,
) -> Result<u32, BadChain> {
    enough(room, size_of::<ControlReply>())?;
    let acted = act();
    let reply = ControlReply {
        status: status(&acted).into(),
        value: acted.unwrap_or(0).into(),
    };
    put(writer, &reply)?;
    Ok(wire_len::<ControlReply>(1))
}

fn enough(room: usize, needed: usize) -> Result<(), BadChain> {
    if room < needed { Err(BadChain) } else { Ok(()) }
}

/// Bytes of `count` structs of the wire.
fn wire_len<T>(count: u32) -> u32 {
    // Structs of the wire are small, and counts bounded by the room that the driver gave.
    u32::try_from(size_of::<T>()).map_or(u32::MAX, |size| size.saturating_mul(count))
}
