package nodeapi

import (
	"context"
	"slices"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/manifests"
)

// The Lease objects in kube-node-lease are for people and for clients that
// look there. They live in the soft store and follow the leases at upstream
// kubelet's pace (a renewal every 10 s, 40 s long), not at ours: at 5,000
// nodes every write saved counts, and nothing of ours reads them.
const (
	leaseObjectInterval = 10 * time.Second
	leaseObjectSeconds  = 40
)

func (s *Server) leaseObjects(ctx context.Context) {
	t := time.NewTicker(leaseObjectInterval)
	defer t.Stop()
	seen := map[string]time.Time{}
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		now, wall := time.Now(), s.cfg.Clock.Now()
		fresh := s.leases.renewedSince(seen)
		names := make([]string, 0, len(fresh))
		for n := range fresh {
			names = append(names, n)
		}
		slices.Sort(names)
		for _, n := range names {
			if ctx.Err() != nil {
				return
			}
			if err := s.writeLease(ctx, n, wall.Add(fresh[n].Sub(now))); err != nil {
				s.warn("lease", n, "lease object not written", err)
				continue
			}
			seen[n] = fresh[n]
		}
	}
}

func (s *Server) writeLease(ctx context.Context, node string, renewed time.Time) error {
	at := metav1.NewMicroTime(renewed)
	seconds := int32(leaseObjectSeconds)
	_, err := s.cfg.Store.Update(ctx, leaseGK, manifests.NodeLeaseNamespace, node, registry.Main, func(o runtime.Object) (runtime.Object, error) {
		l, ok := o.(*coordinationv1.Lease)
		if !ok {
			return o, nil
		}
		l.Spec.HolderIdentity, l.Spec.RenewTime, l.Spec.LeaseDurationSeconds = &node, &at, &seconds
		return l, nil
	}, registry.WriteOptions{})
	if !apierrors.IsNotFound(err) {
		return err
	}
	l := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: manifests.NodeLeaseNamespace, Name: node},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &node, RenewTime: &at, LeaseDurationSeconds: &seconds},
	}
	if n, err := s.getNode(node); err == nil {
		l.OwnerReferences = []metav1.OwnerReference{{APIVersion: corev1.SchemeGroupVersion.String(), Kind: "Node", Name: n.Name, UID: n.UID}}
	}
	_, err = s.cfg.Store.Create(ctx, l, registry.WriteOptions{})
	if apierrors.IsAlreadyExists(err) || apierrors.IsForbidden(err) || apierrors.IsNotFound(err) {
		return nil // somebody else was faster, or the namespace is not there yet
	}
	return err
}

// housekeeping is what happens rarely.
func (s *Server) housekeeping(ctx context.Context) {
	t := time.NewTicker(10 * time.Minute)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if _, leading := s.cfg.Leadership.Leadership(); leading && s.clockOK() == nil {
			s.dropTokens(ctx)
		}
	}
}
