package api

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	internalvalidation "k8s.io/apimachinery/pkg/apis/meta/internalversion/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// listQuery is a parsed list or watch request.
type listQuery struct {
	metav1.ListOptions
	match *registry.Matcher
	rv    uint64 // of ResourceVersion, 0 if unset or "0"
}

func parseListQuery(rq *request) (*listQuery, error) {
	q := &listQuery{}
	v := rq.URL.Query()
	if err := metav1.Convert_url_Values_To_v1_ListOptions(&v, &q.ListOptions, nil); err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	q.Watch = rq.info.verb == "watch"
	if errs := internalvalidation.ValidateListOptions(&internalversion.ListOptions{
		Watch: q.Watch, ResourceVersion: q.ResourceVersion, ResourceVersionMatch: q.ResourceVersionMatch,
		Continue: q.Continue, SendInitialEvents: q.SendInitialEvents, Limit: q.Limit,
	}, true); len(errs) > 0 {
		return nil, invalidOptions("ListOptions", errs)
	}
	sel, err := labels.Parse(q.LabelSelector)
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	f, err := fields.ParseSelector(q.FieldSelector)
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	// A list of one name, in the old form of a watch on a named path.
	if rq.info.name != "" {
		if f.Empty() {
			f = fields.OneTermEqualSelector("metadata.name", rq.info.name)
		} else if name, ok := f.RequiresExactMatch("metadata.name"); !ok || name != rq.info.name {
			return nil, apierrors.NewBadRequest("fieldSelector metadata.name doesn't match requested name")
		}
	}
	if q.match, err = registry.NewMatcher(rq.kind, sel, f); err != nil {
		return nil, err
	}
	if q.Watch || q.Continue == "" {
		q.rv, err = parseVersion(q.ResourceVersion)
	}
	return q, err
}

// parseVersion reads a resourceVersion; "" is 0. Upstream answers 500 to a
// bad one in a get or watch; the fault is the client's in all.
func parseVersion(s string) (uint64, error) {
	if s == "" {
		return 0, nil
	}
	rv, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, apierrors.NewBadRequest("invalid resource version: " + field.Invalid(field.NewPath("resourceVersion"), s, err.Error()).Error())
	}
	return rv, nil
}

// fresh makes sure that the local state is new enough for a read: verified
// by the leader when no version is asked, at least rv otherwise. Without a
// quorum the read is served from what is here, and says so.
func (s *Server) fresh(rq *request, reader state.Reader, version string, rv uint64) error {
	if version == "0" || (rv > 0 && reader.Snapshot().ResourceVersion() >= rv) {
		return nil
	}
	ctx, cancel := context.WithTimeout(rq.Context(), 5*time.Second)
	defer cancel()
	err := s.cfg.Proposer.Barrier(ctx)
	if err != nil {
		if rq.Context().Err() != nil {
			return rq.Context().Err()
		}
		if rv == 0 {
			reason := "the leader does not answer"
			switch {
			case errors.Is(err, state.ErrNoQuorum):
				reason = "no quorum of servers"
			case errors.Is(err, state.ErrDiskFull):
				reason = err.Error()
			}
			rq.warn("this answer may be out of date: " + reason)
			return nil
		}
	}
	if cur := reader.Snapshot().ResourceVersion(); rv > cur {
		return tooLargeVersion(rv, cur)
	}
	return nil
}

func tooLargeVersion(want, cur uint64) error {
	e := apierrors.NewTimeoutError(fmt.Sprintf("Too large resource version: %d, current: %d", want, cur), 1)
	e.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: metav1.CauseTypeResourceVersionTooLarge, Message: "Too large resource version"}}
	return e
}

// get answers one object.
func (s *Server) get(rq *request) error {
	at, err := s.codecs.negotiate(rq.Request, true, false)
	if err != nil {
		return err
	}
	v := rq.URL.Query()
	var o metav1.GetOptions
	if err := metav1.Convert_url_Values_To_v1_GetOptions(&v, &o, nil); err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	obj, err := s.read(rq, o.ResourceVersion)
	if err != nil {
		return err
	}
	return s.answer(rq, at, http.StatusOK, obj)
}

// read gets the object that the request names.
func (s *Server) read(rq *request, version string) (runtime.Object, error) {
	rv, err := parseVersion(version)
	if err != nil {
		return nil, err
	}
	gk := rq.kind.GroupKind()
	if err := s.fresh(rq, s.cfg.Registry.ReaderFor(gk, rq.info.namespace), version, rv); err != nil {
		return nil, err
	}
	return s.cfg.Registry.Get(gk, rq.info.namespace, rq.info.name)
}

// list answers a list or one page of it.
func (s *Server) list(rq *request) error {
	at, err := s.codecs.negotiate(rq.Request, true, false)
	if err != nil {
		return err
	}
	q, err := parseListQuery(rq)
	if err != nil {
		return err
	}
	list, err := s.page(rq, q)
	if err != nil {
		return err
	}
	return s.answer(rq, at, http.StatusOK, list)
}

// page collects the items of one page.
func (s *Server) page(rq *request, q *listQuery) (runtime.Object, error) {
	k, ns := rq.kind, rq.info.namespace
	reader := s.cfg.Registry.ReaderFor(k.GroupKind(), ns)
	soft := manifests.IsSoft(k, ns)
	snap, token, err := s.snapshotFor(rq, q, reader, soft)
	if err != nil {
		return nil, err
	}
	if rq.listed, err = s.limiter.lists.enter(rq.Context(), rq.identity); err != nil {
		s.metrics.rejected.WithLabelValues("list").Inc()
		return nil, apierrors.NewTooManyRequests("too many lists are being made; please try again later", 1)
	}
	after := state.Key{}
	if token.Name != "" {
		after = state.Key{Kind: k.StorageKind(), Namespace: token.Namespace, Name: token.Name}
	}
	if token.RV == -1 {
		// A list that goes on after its version was forgotten is consistent
		// again from here on, at the version of this page.
		left := 0
		snap.Range(k.StorageKind(), ns, after, func(*state.Record) bool { left++; return true })
		token.Sent = snap.Len(k.StorageKind(), ns) - left
	}
	limit := int64(math.MaxInt64)
	if q.Limit > 0 {
		limit = q.Limit
	}
	items, last, more, err := s.collect(k, snap, ns, after, limit, q.match)
	if err != nil {
		return nil, err
	}
	if ns == "" && k.Namespaced && !soft && !more {
		// Node leases are in another store, behind the durable ones.
		if items, err = s.appendSoft(k, items, q.match); err != nil {
			return nil, err
		}
	}
	lm := metav1.ListMeta{ResourceVersion: formatRV(snap.ResourceVersion())}
	if more {
		next := continueToken{RV: int64(snap.ResourceVersion()), Namespace: last.Namespace, Name: last.Name, Sent: token.Sent + len(items)}
		s.pages.keep(soft, snap)
		lm.Continue = next.encode()
		if left := int64(snap.Len(k.StorageKind(), ns) - next.Sent); q.match.Everything() && left > 0 {
			lm.RemainingItemCount = &left
		}
	}
	return listOf(k, items, lm)
}

// snapshotFor finds the version that a list shall show.
func (s *Server) snapshotFor(rq *request, q *listQuery, reader state.Reader, soft bool) (state.Snapshot, continueToken, error) {
	if q.Continue != "" {
		token, err := decodeToken(q.Continue)
		if err != nil {
			return nil, token, err
		}
		if q.ResourceVersion != "" && q.ResourceVersion != "0" {
			return nil, token, apierrors.NewBadRequest("specifying resource version is not allowed when using continue")
		}
		if token.RV == -1 {
			return reader.Snapshot(), token, s.fresh(rq, reader, "", 0)
		}
		snap, ok := s.pages.at(soft, uint64(token.RV))
		if !ok {
			return nil, token, expiredToken(token)
		}
		return snap, token, nil
	}
	if err := s.fresh(rq, reader, q.ResourceVersion, q.rv); err != nil {
		return nil, continueToken{}, err
	}
	snap := reader.Snapshot()
	if q.ResourceVersionMatch == metav1.ResourceVersionMatchExact && snap.ResourceVersion() != q.rv {
		old, ok := s.pages.at(soft, q.rv)
		if !ok {
			return nil, continueToken{}, apierrors.NewResourceExpired(fmt.Sprintf("The resourceVersion for the provided list is too old: %d", q.rv))
		}
		snap = old
	}
	return snap, continueToken{}, nil
}

func (s *Server) collect(k *manifests.Kind, snap state.Snapshot, ns string, after state.Key, limit int64, m *registry.Matcher) (items []runtime.Object, last state.Key, more bool, err error) {
	if name := m.Name(); name != "" && (ns != "" || !k.Namespaced) {
		rec, ok := snap.Get(state.Key{Kind: k.StorageKind(), Namespace: ns, Name: name})
		if !ok || after.Name != "" {
			return nil, last, false, nil
		}
		if ok, err = m.Matches(s.cfg.Registry, rec); err != nil || !ok {
			return nil, last, false, err
		}
		obj, err := s.cfg.Registry.DecodeAs(k, rec)
		return []runtime.Object{obj}, last, false, err
	}
	snap.Range(k.StorageKind(), ns, after, func(rec *state.Record) bool {
		var ok bool
		if ok, err = m.Matches(s.cfg.Registry, rec); err != nil || !ok {
			return err == nil
		}
		if int64(len(items)) >= limit {
			more = true
			return false
		}
		var obj runtime.Object
		if obj, err = s.cfg.Registry.DecodeAs(k, rec); err != nil {
			return false
		}
		items, last = append(items, obj), rec.Header.Key
		return true
	})
	return items, last, more, err
}

// appendSoft adds the soft objects of a kind that has both.
func (s *Server) appendSoft(k *manifests.Kind, items []runtime.Object, m *registry.Matcher) ([]runtime.Object, error) {
	if !manifests.IsSoft(k, manifests.NodeLeaseNamespace) {
		return items, nil
	}
	reader := s.cfg.Registry.ReaderFor(k.GroupKind(), manifests.NodeLeaseNamespace)
	more, _, _, err := s.collect(k, reader.Snapshot(), manifests.NodeLeaseNamespace, state.Key{}, math.MaxInt64, m)
	return append(items, more...), err
}
