package nodeapi

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/wire"
)

// Storage kinds of claims and volumes.
const (
	claimKind  = "PersistentVolumeClaim"
	volumeKind = "PersistentVolume"
)

var volumeGK = schema.GroupKind{Kind: volumeKind}

// findDoomed looks through all volumes once, before the watch is followed.
func (a *assigner) findDoomed(snap state.Snapshot) {
	a.mu.Lock()
	defer a.mu.Unlock()
	clear(a.doomed)
	snap.Range(volumeKind, "", state.Key{}, func(r *state.Record) bool {
		a.doom(r, false)
		return true
	})
}

// doom files a volume under its node while it is being deleted, and names the
// node if that changed anything; a.mu is held.
func (a *assigner) doom(r *state.Record, gone bool) (node string) {
	k := r.Header.Key
	if gone || r.Header.Deleted == 0 {
		for node, keys := range a.doomed {
			if keys[k] {
				if delete(keys, k); len(keys) == 0 {
					delete(a.doomed, node)
				}
				return node
			}
		}
		return ""
	}
	obj, err := a.s.cfg.Store.Decode(r)
	v, ok := obj.(*corev1.PersistentVolume)
	if err != nil || !ok {
		a.s.log.Error("a volume cannot be decoded", "volume", k.Name, "error", err)
		return ""
	}
	if node = manifests.LocalVolumeNode(v); node == "" || !slices.Contains(v.Finalizers, manifests.FinalizerData) {
		return ""
	}
	if a.doomed[node] == nil {
		a.doomed[node] = map[state.Key]bool{}
	}
	a.doomed[node][k] = true
	return node
}

// doomedOn lists the volumes that a node shall remove.
func (a *assigner) doomedOn(node string) (out []state.Key) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for k := range a.doomed[node] {
		out = append(out, k)
	}
	return out
}

// volumesNews takes a node's word that the data of volumes is gone: what kept
// them goes.
func (s *Server) volumesNews(ctx context.Context, sess *session, list []wire.VolumeReport, reply *wire.ReportReply) {
	for i := range list {
		v := &list[i]
		err := s.volumeNews(ctx, sess, v)
		switch {
		case err == nil, apierrors.IsNotFound(err):
			reply.Committed = append(reply.Committed, v.UID)
		default:
			s.warn("volume", v.Name, "removal of a volume's data not written", err)
			reply.Retry = append(reply.Retry, v.UID)
		}
	}
}

func (s *Server) volumeNews(ctx context.Context, sess *session, v *wire.VolumeReport) error {
	if !v.Removed {
		return nil
	}
	_, err := s.cfg.Store.Update(ctx, volumeGK, "", v.Name, registry.Main, func(cur runtime.Object) (runtime.Object, error) {
		now, ok := cur.(*corev1.PersistentVolume)
		machine := ""
		if ok {
			machine = now.Annotations[manifests.AnnotationMachine]
		}
		if !ok || string(now.UID) != v.UID || now.DeletionTimestamp == nil || manifests.LocalVolumeNode(now) != sess.node ||
			machine != "" && machine != s.providerID(sess.uid) {
			return cur, nil // not its to say
		}
		now.Finalizers = slices.DeleteFunc(now.Finalizers, func(f string) bool { return f == manifests.FinalizerData })
		return now, nil
	}, registry.WriteOptions{})
	return err
}
