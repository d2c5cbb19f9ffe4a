//! Streams of a run: lane 0 is the main one, the others run beside it and meet it at events.

use super::context::{Context, Event, Stream};
use crate::capture::ArmPlan;
use crate::device::DeviceError;
use std::rc::Rc;

/// One stream a lane, and the events that fork and join them.
#[derive(Debug)]
pub(super) struct Lanes {
    streams: Vec<Stream>,
    fork: Event,
    joins: Vec<Event>,
}

impl Lanes {
    pub fn new(context: &Rc<Context>, count: usize) -> Result<Self, DeviceError> {
        let count = count.max(1);
        Ok(Self {
            streams: (0..count).map(|_| context.stream()).collect::<Result<_, _>>()?,
            fork: context.event(false)?,
            joins: (1..count).map(|_| context.event(false)).collect::<Result<_, _>>()?,
        })
    }

    pub fn main(&self) -> &Stream {
        &self.streams[0]
    }

    /// The stream of a lane; lanes that were not asked for run on the main one.
    pub fn of(&self, lane: usize) -> &Stream {
        self.streams.get(lane).unwrap_or(&self.streams[0])
    }

    /// The side lanes wait for what the main one has been given so far.
    pub fn fork(&self) -> Result<(), DeviceError> {
        if self.streams.len() > 1 {
            self.fork.record(self.main())?;
            self.streams[1..].iter().try_for_each(|s| s.wait(&self.fork))?;
        }
        Ok(())
    }

    /// The main lane waits for what the side lanes have been given so far.
    pub fn join(&self) -> Result<(), DeviceError> {
        for (event, stream) in self.joins.iter().zip(&self.streams[1..]) {
            event.record(stream)?;
            self.main().wait(event)?;
        }
        Ok(())
    }
}

/// Which launches wait for which, across lanes.
#[derive(Debug)]
pub(super) struct Dependencies {
    /// By launch: earlier launches on other lanes, and whether both lie in the same graph or both outside.
    waits: Vec<Vec<(usize, bool)>>,
    /// By launch: recorded after it, if another lane waits for it.
    events: Vec<Option<Event>>,
}

impl Dependencies {
    pub fn new(context: &Rc<Context>, arm: &ArmPlan) -> Result<Self, DeviceError> {
        let waits = cross_lane(arm)?;
        let mut awaited = vec![false; waits.len()];
        waits.iter().flatten().for_each(|(j, _)| awaited[*j] = true);
        let events = awaited.iter().map(|a| a.then(|| context.event(false)).transpose());
        Ok(Self { events: events.collect::<Result<_, _>>()?, waits })
    }

    /// Before launch `i` on `stream`. `graphed`: graphs are captured or being captured, so waits that cross
    /// their edges are left to the joins there.
    pub fn before(&self, i: usize, stream: &Stream, graphed: bool) -> Result<(), DeviceError> {
        for (j, same_side) in &self.waits[i] {
            if let Some(event) = self.events[*j].as_ref().filter(|_| *same_side || !graphed) {
                stream.wait(event)?;
            }
        }
        Ok(())
    }

    /// After launch `i` on `stream`.
    pub fn after(&self, i: usize, stream: &Stream) -> Result<(), DeviceError> {
        self.events[i].as_ref().map_or(Ok(()), |event| event.record(stream))
    }
}

fn cross_lane(arm: &ArmPlan) -> Result<Vec<Vec<(usize, bool)>>, DeviceError> {
    let launches = &arm.program.launches;
    // Segment of each launch that lies in a graph.
    let mut graph = vec![None; launches.len()];
    for (s, segment) in arm.segments.iter().enumerate().filter(|(_, s)| s.graph.is_some()) {
        for i in segment.launches.clone() {
            match graph.get_mut(i) {
                Some(slot) => *slot = Some(s),
                None => return Err(DeviceError::internal("a segment names a launch that does not exist")),
            }
        }
    }
    let mut waits = vec![Vec::new(); launches.len()];
    for (i, launch) in launches.iter().enumerate() {
        for &j in &launch.after {
            if j >= i {
                return Err(DeviceError::internal(format!("launch {i} waits for the later launch {j}")));
            }
            if launches[j].lane != launch.lane {
                waits[i].push((j, graph[i] == graph[j]));
            }
        }
    }
    Ok(waits)
}
