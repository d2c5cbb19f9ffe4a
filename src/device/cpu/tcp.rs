//! Exchanges between the processes of a CPU run: one TCP connection between any two, each message with its number and
//! length, so that ranks that do not run the same list are found out and not mixed up.

use crate::device::DeviceError;
use crate::ops::Real;
use crate::ranks::groups::Group;
use std::cell::RefCell;
use std::io::{self, Read, Write};
use std::net::TcpStream;

/// Message number and bytes.
const HEADER_BYTES: usize = 16;
/// A message of this size lies in the kernel's buffers whatever the other side does; a larger one has a thread of its own.
const BUFFERED_BYTES: usize = 16 << 10;

/// Connections to all other ranks.
#[derive(Debug)]
pub struct Mesh {
    /// By rank; `None` at this one's place.
    peers: Vec<Option<TcpStream>>,
    /// Messages exchanged with each rank.
    counts: Vec<u64>,
}

thread_local! {
    /// Of the rank that this thread runs.
    static MESH: RefCell<Option<Mesh>> = const { RefCell::new(None) };
}

impl Mesh {
    pub fn new(peers: Vec<Option<TcpStream>>) -> io::Result<Self> {
        for peer in peers.iter().flatten() {
            peer.set_nodelay(true)?;
        }
        Ok(Self { counts: vec![0; peers.len()], peers })
    }

    /// Serves the ops that this thread runs from now on.
    pub fn install(self) {
        MESH.set(Some(self));
    }

    /// Sends `sent[i]` to the group's i-th rank and gives what each sent here, `expected[i]` bytes.
    fn exchange(
        &mut self,
        group: &Group,
        sent: &[Vec<u8>],
        expected: &[usize],
    ) -> Result<Vec<Vec<u8>>, DeviceError> {
        let gone = |rank: usize, e: io::Error| {
            DeviceError::Invalid(format!("the connection to rank {rank} broke ({e}): that process has ended"))
        };
        let mut received = vec![Vec::new(); group.len()];
        received[group.own].clone_from(&sent[group.own]);
        let others: Vec<usize> = (0..group.len()).filter(|i| *i != group.own).collect();
        std::thread::scope(|scope| {
            let mut writers = Vec::new();
            for &i in &others {
                let rank = group.ranks[i];
                let number = self.counts[rank];
                let peer = self.peers.get(rank).and_then(Option::as_ref);
                let peer =
                    peer.ok_or_else(|| DeviceError::internal(format!("no connection to rank {rank}")))?;
                let mut message = Vec::with_capacity(HEADER_BYTES + sent[i].len());
                message.extend(number.to_le_bytes());
                message.extend((sent[i].len() as u64).to_le_bytes());
                message.extend(&sent[i]);
                let write = move || (&mut &*peer).write_all(&message).map_err(|e| gone(rank, e));
                if sent[i].len() <= BUFFERED_BYTES {
                    write()?;
                } else {
                    writers.push(scope.spawn(write));
                }
            }
            for &i in &others {
                let rank = group.ranks[i];
                let number = self.counts[rank];
                let Some(mut peer) = self.peers[rank].as_ref() else { continue };
                let mut header = [0; HEADER_BYTES];
                peer.read_exact(&mut header).map_err(|e| gone(rank, e))?;
                let (theirs, bytes) = header.split_at(HEADER_BYTES / 2);
                let word = |b: &[u8]| b.iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b));
                if (word(theirs), word(bytes)) != (number, expected[i] as u64) {
                    return Err(DeviceError::internal(format!(
                        "rank {rank} sent message {} of {} bytes where {number} of {} was due ({})",
                        word(theirs),
                        word(bytes),
                        expected[i],
                        group.kind
                    )));
                }
                received[i] = vec![0; expected[i]];
                peer.read_exact(&mut received[i]).map_err(|e| gone(rank, e))?;
            }
            for writer in writers {
                writer.join().map_err(|_| DeviceError::internal("a sending thread panicked"))??;
            }
            Ok(())
        })?;
        others.iter().for_each(|i| self.counts[group.ranks[*i]] += 1);
        Ok(received)
    }
}

/// An element as it travels.
pub trait Wire: Copy {
    const BYTES: usize;
    fn put(self, out: &mut Vec<u8>);
    fn get(bytes: &[u8]) -> Self;
}

impl<T: Real> Wire for T {
    const BYTES: usize = size_of::<T>();
    fn put(self, out: &mut Vec<u8>) {
        if Self::BYTES == 4 {
            out.extend((self.f64() as f32).to_le_bytes());
        } else {
            out.extend(self.f64().to_le_bytes());
        }
    }
    fn get(bytes: &[u8]) -> Self {
        let single = bytes.try_into().map(|b| f64::from(f32::from_le_bytes(b)));
        T::of(single.or_else(|_| bytes.try_into().map(f64::from_le_bytes)).unwrap_or(f64::NAN))
    }
}

/// Integers, bit by bit.
impl Wire for i32 {
    const BYTES: usize = 4;
    fn put(self, out: &mut Vec<u8>) {
        out.extend(self.to_le_bytes());
    }
    fn get(bytes: &[u8]) -> Self {
        bytes.try_into().map_or(0, i32::from_le_bytes)
    }
}

/// Gives `sent[i]` to the group's i-th rank; returns what each gave to this one, `expected[i]` elements.
///
/// # Errors
/// A rank that has ended, or that runs another list of exchanges.
pub fn exchange<E: Wire>(
    group: &Group,
    sent: &[&[E]],
    expected: &[usize],
) -> Result<Vec<Vec<E>>, DeviceError> {
    let packed = |elements: &&[E]| {
        let mut bytes = Vec::with_capacity(elements.len() * E::BYTES);
        elements.iter().for_each(|e| e.put(&mut bytes));
        bytes
    };
    let sent: Vec<Vec<u8>> = sent.iter().map(packed).collect();
    let expected: Vec<usize> = expected.iter().map(|n| n * E::BYTES).collect();
    let received = MESH.with_borrow_mut(|mesh| match mesh {
        Some(mesh) => mesh.exchange(group, &sent, &expected),
        None => Err(DeviceError::internal("an exchange between ranks in a run of one process")),
    })?;
    Ok(received.iter().map(|bytes| bytes.chunks_exact(E::BYTES).map(E::get).collect()).collect())
}

/// Connections of `ranks` ranks in one process, for tests: each is given to a thread of its own.
#[cfg(test)]
pub fn meshes(ranks: usize) -> Vec<Mesh> {
    let mut peers: Vec<Vec<Option<TcpStream>>> = Vec::new();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    for own in 0..ranks {
        // With each rank before it one connection, whose other end is that one's.
        let mut row: Vec<Option<TcpStream>> = (0..ranks).map(|_| None).collect();
        for (other, before) in peers.iter_mut().enumerate() {
            row[other] = Some(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
            before[own] = Some(listener.accept().unwrap().0);
        }
        peers.push(row);
    }
    peers.into_iter().map(|p| Mesh::new(p).unwrap()).collect()
}
