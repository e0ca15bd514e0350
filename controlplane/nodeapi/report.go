package nodeapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/controllers/endpoints"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/wire"
)

// reportWriters bounds the writes of one report that are in flight together;
// the consensus layer puts them into one log entry.
const reportWriters = 32

// maxReportEvents bounds the Events taken from one report.
const maxReportEvents = 256

// report takes a batch of news.
func (s *Server) report(ctx context.Context, sess *session, r *wire.Report) (*wire.ReportReply, error) {
	select {
	case sess.reports <- struct{}{}:
		defer func() { <-sess.reports }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if s.sessionOf(sess.uid) != sess {
		return nil, &wire.Fault{Code: wire.FaultNotLeader, Message: "the session is over"}
	}
	if last, ok := s.order(sess.uid, r.BootID, r.Seq); !ok {
		return &wire.ReportReply{Seq: last, Refused: fmt.Sprintf("report %d is older than %d, which came before", r.Seq, last)}, nil
	}
	reply := &wire.ReportReply{Seq: r.Seq, Epoch: s.cfg.Epoch()}
	if len(r.Node) > 0 {
		said, err := decodeNode(r.Node)
		if err != nil {
			return nil, &wire.Fault{Code: wire.FaultMalformed, Message: err.Error()}
		}
		if err := sess.say(ctx, func() error {
			if err := s.nodeNews(ctx, sess, said); err != nil {
				return err
			}
			sess.lastNode = r.Node
			return nil
		}); err != nil {
			s.warn("node", sess.node, "node status not written", err)
			reply.Refused = "node: " + err.Error()
		}
	}
	s.podsNews(ctx, sess, r.Pods, reply)
	s.volumesNews(ctx, sess, r.Volumes, reply)
	s.eventsNews(sess, r.Events)
	s.leases.reported(sess.node)
	return reply, ctx.Err()
}

func decodeNode(b []byte) (*corev1.Node, error) {
	n := new(corev1.Node)
	if err := direct.Unmarshal(b, n); err != nil {
		return nil, fmt.Errorf("node: %w", err)
	}
	return n, nil
}

// order remembers the newest report of each node. The same report may come
// again (its answer was lost); an older one is dropped.
func (s *Server) order(uid, boot string, seq uint64) (last uint64, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	cur, have := s.seqs[uid]
	if have && cur.boot == boot && seq < cur.seq {
		return cur.seq, false
	}
	s.seqs[uid] = reportSeq{boot, seq}
	return seq, true
}

type reportSeq struct {
	boot string
	seq  uint64
}

// verdict is what became of one entry.
type verdict uint8

const (
	committed verdict = iota
	unknown
	again
)

func (s *Server) podsNews(ctx context.Context, sess *session, pods []wire.PodReport, reply *wire.ReportReply) {
	var mu sync.Mutex
	var g errgroup.Group
	g.SetLimit(reportWriters)
	for i := range pods {
		p := &pods[i]
		g.Go(func() error {
			var v verdict
			s.writes <- struct{}{}
			s.turns.Do(ctx, func(ctx context.Context) { v = s.podNews(ctx, sess, p) })
			<-s.writes
			mu.Lock()
			defer mu.Unlock()
			switch v {
			case committed:
				reply.Committed = append(reply.Committed, p.UID)
			case unknown:
				reply.Unknown = append(reply.Unknown, p.UID)
			case again:
				reply.Retry = append(reply.Retry, p.UID)
			}
			return nil
		})
	}
	_ = g.Wait() // nothing returns an error
	slices.Sort(reply.Committed)
	slices.Sort(reply.Unknown)
	slices.Sort(reply.Retry)
}

func (s *Server) podNews(ctx context.Context, sess *session, p *wire.PodReport) verdict {
	var status *corev1.PodStatus
	if len(p.Status) > 0 {
		status = new(corev1.PodStatus)
		if err := direct.Unmarshal(p.Status, status); err != nil {
			s.warn("pod", p.Namespace+"/"+p.Name, "pod status cannot be decoded", err)
			return again
		}
	}
	uid := types.UID(p.UID)
	mirror := len(p.Mirror) > 0
	if mirror {
		var err error
		if uid, err = s.mirror(ctx, sess, p); err != nil {
			return s.outcome(p, "mirror pod not made", err)
		}
	}
	if len(p.Ports) > 0 {
		// Before the status: once the pod is Ready its endpoints must be right.
		if err := s.writePorts(ctx, sess, p, uid); err != nil {
			return s.outcome(p, "pod ports not written", err)
		}
	}
	if status != nil {
		if err := s.writeStatus(ctx, sess, p, uid, status); err != nil {
			return s.outcome(p, "pod status not written", err)
		}
	}
	if p.Gone {
		if err := s.gone(ctx, sess, p, uid); err != nil {
			return s.outcome(p, "pod not removed", err)
		}
	}
	return committed
}

var (
	errNotOurs = errors.New("nodeapi: no such pod on this node")
	errArrow   = errors.New("nodeapi: the node may not move the pod there")
)

func (s *Server) outcome(p *wire.PodReport, what string, err error) verdict {
	switch {
	case apierrors.IsNotFound(err), errors.Is(err, errNotOurs):
		return unknown
	case errors.Is(err, errArrow):
		// Repeating it cannot help: the cluster's word stands and goes out with
		// the assignment.
		s.warn("pod", p.Namespace+"/"+p.Name, what, err)
		return committed
	case errors.Is(err, context.Canceled):
		return again
	}
	s.warn("pod", p.Namespace+"/"+p.Name, what, err)
	return again
}

func (s *Server) writeStatus(ctx context.Context, sess *session, p *wire.PodReport, uid types.UID, said *corev1.PodStatus) error {
	_, err := s.cfg.Store.Update(ctx, podGK, p.Namespace, p.Name, registry.Status, func(o runtime.Object) (runtime.Object, error) {
		pod, ok := o.(*corev1.Pod)
		if !ok || pod.UID != uid || pod.Spec.NodeName != sess.node {
			return nil, errNotOurs
		}
		merged, err := mergePodStatus(pod, said)
		if err != nil {
			return nil, err
		}
		pod.Status = merged
		return pod, nil
	}, registry.WriteOptions{})
	return err
}

// writePorts says in the pod's annotation where its ports really are, on a
// node without a pod network. The annotation is the node's.
func (s *Server) writePorts(ctx context.Context, sess *session, p *wire.PodReport, uid types.UID) error {
	text, err := portsText(p.Ports)
	if err != nil {
		return err
	}
	if o, err := s.cfg.Store.Get(podGK, p.Namespace, p.Name); err == nil {
		if pod, ok := o.(*corev1.Pod); ok && pod.UID == uid && pod.Annotations[endpoints.PortsAnnotation] == text {
			return nil
		}
	}
	_, err = s.cfg.Store.Update(ctx, podGK, p.Namespace, p.Name, registry.Main, func(o runtime.Object) (runtime.Object, error) {
		pod, ok := o.(*corev1.Pod)
		if !ok || pod.UID != uid || pod.Spec.NodeName != sess.node {
			return nil, errNotOurs
		}
		if pod.Annotations == nil {
			pod.Annotations = map[string]string{}
		}
		pod.Annotations[endpoints.PortsAnnotation] = text
		return pod, nil
	}, registry.WriteOptions{})
	return err
}

// portsText is a JSON object from containerPort to the real port, by the
// order of encoding/json, so that equal maps are equal text.
func portsText(ports map[int32]int32) (string, error) {
	for from, to := range ports {
		if from < 1 || from > 65535 || to < 1 || to > 65535 {
			return "", fmt.Errorf("nodeapi: port %d at %d: not a port", from, to)
		}
	}
	b, err := json.Marshal(ports)
	if err != nil {
		return "", fmt.Errorf("nodeapi: ports: %w", err)
	}
	return string(b), nil
}

// nodeOwnsCondition says which conditions of a pod are the node's verdict.
func nodeOwnsCondition(t corev1.PodConditionType) bool {
	switch t {
	case corev1.PodReady, corev1.ContainersReady, corev1.PodInitialized, corev1.PodReadyToStartContainers,
		corev1.PodResizePending, corev1.PodResizeInProgress, manifests.ConditionDraining:
		return true
	}
	return false
}

// mergePodStatus is the status after the node's word: the node owns phase,
// container states, addresses and its conditions; conditions of others stay,
// unless the node sets one of that type itself (it evicts, too).
func mergePodStatus(pod *corev1.Pod, said *corev1.PodStatus) (corev1.PodStatus, error) {
	cur := &pod.Status
	if cur.Phase == corev1.PodRunning && heldBack(said) {
		// The restored state says that it runs, and a phase does not go back.
		said = said.DeepCopy()
		said.Phase = corev1.PodRunning
	}
	from, to := stage(cur.Phase), stage(said.Phase)
	if err := state.CheckStage(state.ActorNode, from, to); err != nil {
		return corev1.PodStatus{}, fmt.Errorf("%w: %w", errArrow, err)
	}
	out := *said.DeepCopy()
	out.QOSClass = cur.QOSClass
	out.NominatedNodeName = cur.NominatedNodeName
	if out.Phase == "" {
		out.Phase = cur.Phase
	}
	if out.StartTime == nil || (cur.StartTime != nil && cur.StartTime.Before(out.StartTime)) {
		out.StartTime = cur.StartTime
	}
	if out.PodIP != "" && len(out.PodIPs) == 0 {
		out.PodIPs = []corev1.PodIP{{IP: out.PodIP}}
	}
	if out.HostIP != "" && len(out.HostIPs) == 0 {
		out.HostIPs = []corev1.HostIP{{IP: out.HostIP}}
	}
	out.Conditions = nil
	for _, c := range cur.Conditions {
		i := slices.IndexFunc(said.Conditions, func(o corev1.PodCondition) bool { return o.Type == c.Type })
		switch {
		case c.Type == corev1.PodScheduled: // the scheduler's
			out.Conditions = append(out.Conditions, c)
		case i >= 0:
			out.Conditions = append(out.Conditions, newerCondition(c, said.Conditions[i]))
		case !nodeOwnsCondition(c.Type):
			out.Conditions = append(out.Conditions, c)
		}
	}
	for _, c := range said.Conditions {
		if !slices.ContainsFunc(cur.Conditions, func(o corev1.PodCondition) bool { return o.Type == c.Type }) {
			out.Conditions = append(out.Conditions, c)
		}
	}
	if equality.Semantic.DeepEqual(&out, cur) {
		return *cur, nil
	}
	return out, nil
}

// heldBack says whether the node does not start the pod, since it holds what it
// ran before the cluster was restored.
func heldBack(said *corev1.PodStatus) bool {
	return said.Phase == corev1.PodPending && slices.ContainsFunc(slices.Concat(said.InitContainerStatuses, said.ContainerStatuses), func(c corev1.ContainerStatus) bool {
		return c.State.Waiting != nil && c.State.Waiting.Reason == manifests.ReasonHeldAfterRestore
	})
}

func newerCondition(cur, said corev1.PodCondition) corev1.PodCondition {
	if cur.Status == said.Status {
		said.LastTransitionTime = cur.LastTransitionTime
		if cur.Reason == said.Reason && cur.Message == said.Message && cur.ObservedGeneration == said.ObservedGeneration {
			return cur
		}
	}
	return said
}

// stage of a pod that is bound.
func stage(p corev1.PodPhase) state.Stage {
	return state.StageOf(&state.Header{Phase: string(p), NodeName: "bound"})
}

// gone is the node's final delete. A pod that nobody deleted stays: its
// object is not the node's to remove, unless it is a mirror.
func (s *Server) gone(ctx context.Context, sess *session, p *wire.PodReport, uid types.UID) error {
	obj, err := s.cfg.Store.Get(podGK, p.Namespace, p.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	pod, ok := obj.(*corev1.Pod)
	if !ok || pod.Spec.NodeName != sess.node {
		return errNotOurs
	}
	hash, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]
	switch {
	case mirror && hash == p.UID:
		uid = pod.UID
		sess.mu.Lock()
		delete(sess.mirrors, p.Namespace+"/"+p.Name)
		sess.mu.Unlock()
	case pod.UID != uid:
		return nil // another pod has the name: ours is gone
	case pod.DeletionTimestamp == nil:
		return nil
	}
	zero, pre := int64(0), uid
	_, _, err = s.cfg.Store.Delete(ctx, podGK, p.Namespace, p.Name, registry.DeleteOptions{GracePeriodSeconds: &zero, UID: &pre})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if apierrors.IsConflict(err) {
		if o, gerr := s.cfg.Store.Get(podGK, p.Namespace, p.Name); gerr == nil {
			if cur, ok := o.(*corev1.Pod); ok && cur.UID != uid {
				return nil
			}
		}
	}
	return err
}

// mirror makes the API object of a static pod exist and returns its uid. The
// report's UID is the static pod's own, which the mirror carries in its
// annotation.
func (s *Server) mirror(ctx context.Context, sess *session, p *wire.PodReport) (types.UID, error) {
	pod := new(corev1.Pod)
	if err := direct.Unmarshal(p.Mirror, pod); err != nil {
		return "", fmt.Errorf("nodeapi: mirror pod: %w", err)
	}
	if pod.Namespace != p.Namespace || pod.Name != p.Name || (pod.Spec.NodeName != "" && pod.Spec.NodeName != sess.node) {
		return "", errNotOurs
	}
	if !p.Gone {
		sess.mu.Lock()
		if len(sess.mirrors) < maxMirrors {
			kept := *p
			kept.Terminal, kept.Gone = false, false
			sess.mirrors[p.Namespace+"/"+p.Name] = kept
		}
		sess.mu.Unlock()
	}
	obj, err := s.cfg.Store.Get(podGK, p.Namespace, p.Name)
	if err == nil {
		cur, _ := obj.(*corev1.Pod)
		hash, isMirror := cur.Annotations[corev1.MirrorPodAnnotationKey]
		switch {
		case !isMirror || cur.Spec.NodeName != sess.node:
			return "", fmt.Errorf("nodeapi: the name of static pod %s/%s is taken by another pod: %w", p.Namespace, p.Name, errNotOurs)
		case hash == p.UID && cur.DeletionTimestamp == nil:
			return cur.UID, nil
		}
		zero, uid := int64(0), cur.UID
		if _, _, err := s.cfg.Store.Delete(ctx, podGK, p.Namespace, p.Name, registry.DeleteOptions{GracePeriodSeconds: &zero, UID: &uid}); err != nil && !apierrors.IsNotFound(err) {
			return "", err
		}
	} else if !apierrors.IsNotFound(err) {
		return "", err
	}
	if p.Gone {
		return "", errNotOurs
	}
	made, err := s.createMirror(ctx, sess, p, pod)
	if err != nil {
		return "", err
	}
	return made, nil
}

// maxMirrors bounds the static pods of one node that are kept in memory.
const maxMirrors = 256

func (s *Server) createMirror(ctx context.Context, sess *session, p *wire.PodReport, pod *corev1.Pod) (types.UID, error) {
	pod.Spec.NodeName = sess.node
	pod.UID, pod.ResourceVersion, pod.DeletionTimestamp, pod.DeletionGracePeriodSeconds = "", "", nil, nil
	pod.Finalizers = nil
	if pod.Annotations == nil {
		pod.Annotations = map[string]string{}
	}
	pod.Annotations[corev1.MirrorPodAnnotationKey] = p.UID
	if n, err := s.getNode(sess.node); err == nil {
		yes := true
		pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: n.Name, UID: n.UID, Controller: &yes}}
	}
	obj, err := s.cfg.Store.Create(ctx, pod, registry.WriteOptions{User: "system:node:" + sess.node})
	if err != nil {
		return "", err
	}
	made, _ := obj.(*corev1.Pod)
	return made.UID, nil
}

func (s *Server) eventsNews(sess *session, list []wire.EventReport) {
	if s.cfg.Events == nil {
		return
	}
	if len(list) > maxReportEvents {
		list = list[len(list)-maxReportEvents:]
	}
	for i := range list {
		e := &list[i]
		gk := schema.ParseGroupKind(e.Object.Kind)
		ref := corev1.ObjectReference{Kind: gk.Kind, Namespace: e.Object.Namespace, Name: e.Object.Name,
			UID: types.UID(e.UID), FieldPath: e.FieldPath}
		if k := manifests.ByGroupKind(gk); k != nil {
			ref.APIVersion = k.GVK.GroupVersion().String()
		}
		if ref.Kind == serviceKind && ref.UID == "" {
			// The service table has no uids, and people look for an object's events by it.
			obj, err := s.cfg.Store.Get(gk, ref.Namespace, ref.Name)
			if err != nil {
				continue // it is gone
			}
			if svc, ok := obj.(*corev1.Service); ok {
				ref.UID = svc.UID
			}
		}
		s.cfg.Events.Add(events.Entry{About: ref, Type: e.Type, Reason: e.Reason, Message: e.Message,
			Component: e.Component, Host: sess.node, Time: time.UnixMilli(e.UnixMilli), Count: e.Count, Over: e.Over})
	}
}
