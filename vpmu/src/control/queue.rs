//! Reads requests from the control queue. Every number in a request comes from the guest.

use std::io::Read;

use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, KnownLayout};

use crate::abi::{CONTROL_MAP, CONTROL_MAP_AUX, CONTROL_OPEN, ControlHeader, MapRequest, OpenRequest};
use crate::errno::Errno;
use crate::queues::{BadChain, Chain};
use crate::settings::Limits;
use crate::work;

/// The size, in bytes, of the longest request that has no list of pages.
const LONGEST_WITHOUT_PAGES: usize = size_of::<OpenRequest>();

/// Copies a request, but no more than the length of the longest valid request with the same operation.
pub(super) fn copy_request(chain: &Chain, limits: &Limits) -> Result<Vec<u8>, BadChain> {
    let (len, mut reader) = chain.reader()?;
    let mut request = copy_fixed(&mut reader)?;
    let header = ControlHeader::read_from_prefix(&request);
    let pages = match header.map(|(header, _)| header.op.get()) {
        Ok(CONTROL_MAP) => limits.max_ring_pages as usize + 1,
        Ok(CONTROL_MAP_AUX) => limits.max_aux_pages as usize,
        _ => 0,
    };
    let longest = size_of::<MapRequest>() + pages * size_of::<U64>();
    let more = len.min(longest).saturating_sub(request.len());
    request.reserve_exact(more);
    let read = reader.take(more as u64).read_to_end(&mut request);
    work::charge_copied(read.map_err(|_| BadChain)?);
    Ok(request)
}

/// Returns the open request in a chain, without copying more than that. `None` if the chain has another request.
pub(super) fn peek_open(chain: &Chain) -> Option<OpenRequest> {
    let copied = chain.reader().and_then(|(_, mut reader)| copy_fixed(&mut reader));
    let request = copied.ok().and_then(|bytes| parse::<OpenRequest>(&bytes).ok());
    request.filter(|request| request.header.op.get() == CONTROL_OPEN)
}

/// Copies the start of a request, up to the length of the longest request that has no list of pages.
fn copy_fixed(reader: &mut impl Read) -> Result<Vec<u8>, BadChain> {
    let mut request = Vec::with_capacity(LONGEST_WITHOUT_PAGES);
    let read = reader.take(LONGEST_WITHOUT_PAGES as u64).read_to_end(&mut request);
    read.map(|_| request).map_err(|_| BadChain)
}

/// Parses the fixed-size request at the start of `bytes`.
pub(super) fn parse<T: FromBytes + KnownLayout + Immutable>(bytes: &[u8]) -> Result<T, Errno> {
    let parsed = T::read_from_prefix(bytes);
    parsed.map(|(request, _)| request).map_err(|_| Errno::EINVAL)
}
