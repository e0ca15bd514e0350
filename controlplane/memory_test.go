package controlplane

import "testing"

func TestRooms(t *testing.T) {
	for _, c := range []struct {
		memory  uint64
		ring    int64
		objects int
		events  int64
	}{
		{0, 32 << 20, 24 << 20, 16 << 20},
		{128 << 20, 4 << 20, 4 << 20, 2 << 20},
		{512 << 20, 8 << 20, 4 << 20, 4 << 20},
		{1 << 30, 16 << 20, 8 << 20, 8 << 20},
		{8 << 30, 32 << 20, 24 << 20, 16 << 20},
	} {
		if o := eventRoom(c.memory); o.Default.Bytes != c.events || o.RingBytes != c.events/2 {
			t.Errorf("%d MiB: events %d, their ring %d", c.memory>>20, o.Default.Bytes, o.RingBytes)
		}
		if ring, objects := rooms(c.memory); ring != c.ring || objects != c.objects {
			t.Errorf("%d MiB: ring %d, objects %d", c.memory>>20, ring, objects)
		}
	}
}
